"""Look for what would stop a run on this machine or cluster, before it is started.

It examines this machine, every host of --hostfile through ssh, or every rank inside srun or torchrun (start it as
`torchrun ... -m samecurve doctor`). With a recipe and a strategy it also checks what these need.

Each line says what was found, what is wrong and how to fix it. The exit code is 0, or that of the first problem.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from samecurve.cli.commands import Subcommand
from samecurve.config import loader as recipes
from samecurve.config.documents import ConfigProblem, format_problems
from samecurve.config.schema import Recipe
from samecurve.doctor import examination
from samecurve.errors import ConfigurationError
from samecurve.launch.hosts import read_hostfile
from samecurve.planner import model_shape
from samecurve.specs.optimizers import OPTIMIZERS
from samecurve.strategy import launchers, resolve, validate
from samecurve.strategy.launchers import Launch
from samecurve.strategy.plan import Files
from samecurve.strategy.recipe_values import fill_recipe
from samecurve.training import room


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe file, to check what it writes and needs")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="recipe values, as for train.py")
    text = f"{resolve.STRATEGY_HELP}, to check what its operators need"
    parser.add_argument("--strategy", metavar="STRATEGY", type=resolve.strategy_path, help=text)
    parser.add_argument("--hostfile", metavar="FILE", help="examine all hosts of this file: lines NAME slots=N")
    parser.add_argument("--master_addr", metavar="ADDRESS", help="address of the first host (default: its name there)")
    parser.add_argument("--master_port", metavar="N", type=int, default=29500, help="default: %(default)s")
    parser.add_argument(
        "--timeout_seconds",
        metavar="N",
        type=float,
        default=60.0,
        help="time limit of each stage between hosts (default: 60)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the findings as JSON; - for standard output alone")


def run(arguments: argparse.Namespace) -> int | Subcommand:
    recipe = recipes.load_recipe(arguments.recipe, arguments.overrides, auto=True) if arguments.recipe else None
    strategy, problems = None, []
    if arguments.strategy:
        launch = Launch("python", 1)
        files = resolve.read_files(arguments.strategy)
        strategy = resolve.describe_strategy(files, launch)
        if arguments.recipe:  # the keys and values of the files are checked as at the start of a run
            problems = _problems_together(arguments, files)
        problems += [*files.accelerate.problems, *files.deepspeed.problems]
        # a run may have more processes than the doctor
        problems = [problem for problem in problems if not problem.topology]
        if problems:
            raise ConfigurationError(format_problems(problems))
    if arguments.hostfile:
        listed = read_hostfile(arguments.hostfile)
        forwarded = [arguments.recipe, *arguments.overrides] if arguments.recipe else []
        forwarded += ["--strategy", arguments.strategy] if arguments.strategy else []
        forwarded += ["--timeout_seconds", str(arguments.timeout_seconds)]
        findings = examination.examine(
            listed, forwarded, arguments.master_addr, arguments.master_port, arguments.timeout_seconds
        )
        return examination.report(findings, arguments.json)
    needed = needed_bytes(recipe) if recipe else {}
    os.environ.update(launchers.slurm_variables(os.environ))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return Subcommand(
            "samecurve.doctor.ranks", (recipe, strategy, needed, arguments.timeout_seconds, arguments.json)
        )
    return examination.report(examination.one_host(recipe, strategy, needed), arguments.json)


def _problems_together(arguments: argparse.Namespace, files: Files) -> list[ConfigProblem]:
    """Check the recipe under the strategy, with as many processes as its YAML says; those of the files stay in them."""
    said = files.accelerate.get("num_processes")
    launch = Launch("python", said if type(said) is int and said > 0 else 1)
    strategy = resolve.describe_strategy(files, launch)
    source = recipes.read_recipe(
        arguments.recipe, arguments.overrides, lambda document: fill_recipe(document, files, strategy.dims.dp)
    )
    validate.check_strategy(source, files, strategy, launch)
    # the number of accumulation steps follows from the number of processes, which a JSON does not say
    return [problem for problem in source.document.problems if not problem.key.endswith("gradient_accumulation_steps")]


def needed_bytes(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Estimate what a run writes into its output_dir, at least and at most, see `room.Need`. {} if it is not known.

    An adapter's files are small.
    """
    try:
        fields = recipe.model.config or {**model_shape.read(str(recipe.model.path)), **recipe.model.overrides}
        parameters = model_shape.shape(fields, "model", recipe.tokenizer.vocabulary_size).parameters
    except ConfigurationError:  # the planner knows decoders; without a size, free space is shown only
        return {}
    if recipe.adapter.name:
        return {}
    # bytes of a parameter: fp32, but quantized states; how many are frozen, and in no checkpoint, is not known
    state = 1 if recipe.optimizer.name == "adamw_8bit" else 4
    checkpoint = 0 if recipe.optimizer.freezes else 4 + state * len(OPTIMIZERS[recipe.optimizer.name].states)
    export = 4 if recipe.export.enabled else 0
    checkpoints = Path(recipe.output_dir) / "checkpoints"
    num_kept = len([*checkpoints.glob("step_*")])
    needs = room.needs(recipe, checkpoints, int(parameters * checkpoint), int(parameters * export), num_kept)
    own = [need for need in needs if need.folder in (checkpoints, checkpoints.parent)]  # not the cache's
    # a run that goes on removes a checkpoint before it exports
    least = (max if num_kept else sum)([need.least for need in own])
    return {"output_dir": (least, sum(need.most for need in own))}
