"""Resolves command line, environment, recipe and strategy files into one plan, or reports all problems.

Imports nothing heavy, so that a mistake is reported before torch is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from samecurve.config import loader as recipes
from samecurve.config.documents import (
    COMMAND_LINE,
    ENVIRONMENT,
    ConfigProblem,
    format_problems,
)
from samecurve.config.key_hints import near_option
from samecurve.config.source import InvalidValue, RecipeSource
from samecurve.errors import ConfigurationError, TopologyError
from samecurve.specs.environment import shipped_file
from samecurve.storage.records import read_record
from samecurve.strategy import launchers, translation, validate
from samecurve.strategy.launchers import Ancestor, Launch, continues_own_run
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Files, Plan, Strategy
from samecurve.strategy.recipe_values import fill_recipe, unheeded
from samecurve.strategy.timetables import SCHEDULES

STRATEGY_HELP = "a strategy: a name in configs/, an Accelerate YAML or a DeepSpeed JSON"
_STEP = "step_" + 8 * "[0-9]"  # the name of a checkpoint's folder
_USAGE = """Of a key that is given twice the last value counts. Strategies are the files in configs/; without
one the run is a single process. Under `accelerate launch --config_file FILE` that file is the strategy."""


def resolve_plan(
    argv: Sequence[str], environ: Mapping[str, str], ancestors: Callable[[], Sequence[Ancestor]] | None = None
) -> Plan:
    """Resolve the plan of a run.

    Args:
        argv: the arguments without the program's name.
        environ: the environment variables.
        ancestors: replaces the parent processes in tests.

    Raises:
        ConfigurationError: with every problem found; its `output_dir` is the recipe's.
        TopologyError: the same where all problems are about the number of processes.
    """
    # parse_args refuses overrides on both sides of an option
    arguments = command_line().parse_intermixed_args(argv)
    detected = launchers.detect_launch(environ, arguments.local_rank, ancestors)
    launch = launchers.own_processes(detected, arguments.num_processes, environ)
    problems: list[ConfigProblem] = []
    chosen = _choose(arguments.strategy, launch, environ, problems)
    files = read_files(chosen, launchers.num_machines(launch, environ))
    strategy = describe_strategy(files, launch)
    taken: dict[str, str] = {}
    source = recipes.read_recipe(
        arguments.recipe,
        arguments.overrides,
        lambda document: taken.update(fill_recipe(document, files, strategy.dims.dp)),
    )
    notes = validate.check_strategy(source, files, strategy, launch)
    problems += _resume_problems(arguments, source)
    problems += source.document.problems + files.accelerate.problems + files.deepspeed.problems
    precision = source.recipe.precision if source.recipe else ""
    problems += launchers.override_problems(launch, environ, files.written, precision)
    if problems:
        only_topology = all(problem.topology for problem in problems)
        error = (TopologyError if only_topology else ConfigurationError)(format_problems(problems))
        with contextlib.suppress(InvalidValue):  # it may be what is wrong
            error.output_dir = source.value("output_dir")
        raise error
    assert source.recipe is not None  # a recipe that cannot be built is one of the problems above
    no_effect = files.no_effect | launchers.unread_keys(launch, files.accelerate)
    no_effect |= unheeded(source, files, strategy.dims.dp)
    plan = Plan(
        recipe=source.recipe,
        strategy=strategy,
        recipe_path=arguments.recipe,
        overrides=tuple(arguments.overrides),
        notes=(
            *(*source.document.notes, *notes, *taken_values(source, taken)),
            *([f"without effect here: {', '.join(no_effect)}"] if no_effect else []),
        ),
        processes_to_start=0 if launchers.OWN_PROCESSES in environ else arguments.num_processes or 0,
        from_strategy=taken,
        no_effect=no_effect,
    )
    if continues_own_run(environ, source.recipe.output_dir):
        return plan  # what the command line said about resuming was for the first start
    resume = "none" if arguments.fresh else arguments.resume
    return replace(plan, resume=resume, fresh=arguments.fresh)


def taken_values(source: RecipeSource, taken: Mapping[str, str]) -> list[str]:
    """Return the line about the values that a recipe has from the strategy's file; [] without any."""
    values = [f"{key} {json.dumps(source.value(key))} ({place})" for key, place in taken.items()]
    return [f"not in the recipe, so the strategy's file sets {', '.join(values)}"] if values else []


def named_checkpoint(run: Path, name: str) -> Path:
    """Return the folder of a checkpoint by its path or by its name in the run: `best`, `step_00000040`."""
    inside = run / "checkpoints"
    if name == "best":
        name = (read_record(inside / "best.json", {"checkpoint": str}).value or {}).get("checkpoint", name)
    return inside / name if (inside / name).is_dir() else Path(name)


def checkpoint_names(run: Path) -> str:
    """List the names of a run's checkpoints for a message, which begins with a semicolon; "" if there are none."""
    names = sorted(path.name for path in run.glob(f"checkpoints/{_STEP}"))
    return f"; {run} has {', '.join(names)}" if names else ""


def _resume_problems(arguments: argparse.Namespace, source: RecipeSource) -> list[ConfigProblem]:
    """List the problems of --resume and --fresh, after a checkpoint's name in `arguments` has become its path."""
    checkpoint, problems = arguments.resume, []
    if checkpoint in ("auto", "none"):
        return problems
    run = Path()
    with contextlib.suppress(InvalidValue):
        run = Path(source.value("output_dir"))
    checkpoint = arguments.resume = str(named_checkpoint(run, checkpoint))
    if not os.path.isdir(checkpoint):
        why = "no best checkpoint (checkpoint.best)" if checkpoint == "best" else f"no such folder: {checkpoint}"
        text = f"{why}; give auto, none or a checkpoint such as RUN/checkpoints/step_00000040{checkpoint_names(run)}"
        problems.append(ConfigProblem(COMMAND_LINE, "--resume", text))
    elif inside := [path for name in (f"checkpoints/{_STEP}", _STEP) for path in Path(checkpoint).glob(name)]:
        text = f"found {checkpoint}, which holds checkpoints but is none; give one of them, for example {max(inside)}"
        problems.append(ConfigProblem(COMMAND_LINE, "--resume", text))
    if arguments.fresh:
        problems.append(
            ConfigProblem(COMMAND_LINE, "--fresh", f"conflicts with --resume {checkpoint}; keep one of them")
        )
    return problems


class _TrainParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized"):
            message += near_option(message, self) or "; recipe values are written steps=100, without dashes"
        raise ConfigurationError(
            f"{format_problems([ConfigProblem(COMMAND_LINE, '', message)])}\n{self.format_usage().strip()}"
        )


def command_line() -> argparse.ArgumentParser:
    parser = _TrainParser("train.py", description="Train a recipe under a strategy.", epilog=_USAGE, allow_abbrev=False)
    parser.add_argument(
        "recipe", metavar="RECIPE", help="what is trained: a YAML file, for example recipes/quickstart.yaml"
    )
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values, for example steps=100"
    )
    parser.add_argument("--strategy", metavar="STRATEGY", type=strategy_path, help=STRATEGY_HELP)
    parser.add_argument(
        "--resume",
        metavar="WHAT",
        default="auto",
        help="auto (default): the newest good checkpoint in output_dir, if it has any; none; best; or a checkpoint's "
        "folder, or its name in output_dir",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="from the first step, although output_dir has checkpoints: moves them aside",
    )
    parser.add_argument(
        "--num_processes", metavar="N", type=int, help="start N ranks on this machine, instead of a launcher"
    )
    parser.add_argument("--local_rank", metavar="N", type=int, help="added by the deepspeed launcher")
    return parser


def _choose(given: str | None, launch: Launch, environ: Mapping[str, str], problems: list[ConfigProblem]) -> str | None:
    """Return the strategy's file: --strategy, or accelerate launch's config file. If given, both must be the same."""
    config_file = launch.config_file
    if given and config_file and os.path.realpath(given) != os.path.realpath(config_file):
        text = f"found {given}, but accelerate launch uses {config_file}; give both the same file, or omit --strategy"
        problems.append(ConfigProblem(COMMAND_LINE, "--strategy", text))
    if given or config_file:
        return given or config_file
    switches = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
    switched = [name for name in switches if environ.get(name, "false").lower() in ("true", "1", "yes")]
    if switched:
        text = "set, but no strategy file is known; pass --strategy FILE, or --config_file FILE to accelerate launch"
        problems.append(ConfigProblem(ENVIRONMENT, switched[0], text))
    elif launch.launcher == "accelerate" and launch.flags is None:
        text = "accelerate launch started this process, but its config file cannot be found; pass --strategy FILE too"
        problems.append(ConfigProblem(ENVIRONMENT, "ACCELERATE_MIXED_PRECISION", text))
    return None


def strategy_path(given: str) -> str:
    """Return the path of a strategy that is given as NAME, for configs/NAME.yaml, or as FILE.

    The installed configs/ count where the working directory has no such file. A name that no file in configs/ has is
    returned as it is; whoever reads the file reports it.
    """
    if os.path.basename(given) != given or os.path.isfile(given):
        return shipped_file(given)
    path = shipped_file(os.path.join("configs", f"{given}.yaml"))
    return path if os.path.isfile(path) else given


def read_files(chosen: str | None, num_machines: int = 0) -> Files:
    """Read the strategy's files, see translation.read; of the ways to compile only those that the strategy takes."""
    files = translation.read(chosen, num_machines)
    strategy, statements, no_effect = describe_strategy(files, Launch("python", 1)), [], dict(files.no_effect)
    for statement in files.statements:
        if statement.by == "compile":
            kinds = [kind for kind in statement.values if validate.can_compile(strategy, kind)]
            statement = replace(statement, values=tuple(kinds))
        if statement.values:
            statements.append(statement)
        else:
            no_effect[".".join(statement.path)] = f"{strategy.name} cannot be compiled"
    return replace(files, statements=tuple(statements), no_effect=no_effect)


def describe_strategy(files: Files, launch: Launch) -> Strategy:
    """Describe the files' strategy. Invalid values count as absent: validate.py reports them and no plan is made."""
    accelerate, deepspeed = files.accelerate, files.deepspeed
    offloads = [
        (part, deepspeed.get("zero_optimization", f"offload_{part}", "device")) for part in ("optimizer", "param")
    ]
    if accelerate.get("fsdp_config", "fsdp_offload_params") is True:
        offloads += [("optimizer", "cpu"), ("param", "cpu")]
    nvme = [
        deepspeed.get("zero_optimization", f"offload_{part}", "nvme_path")
        for part, device in offloads
        if device == "nvme"
    ]
    kind, stage = accelerate.get("distributed_type"), _count(deepspeed.get("zero_optimization", "stage"), 0)
    backend = "deepspeed" if deepspeed.name or kind == "DEEPSPEED" else "torch"
    schedule, dims = _arrangement(files, backend, launch.world_size)
    sharding = "fsdp" if backend == "torch" and kind == "FSDP" and (not schedule or dims.dp_shard > 1) else "none"
    # hpZ's second copy is of gathered weights, and only stage 3 gathers them
    secondary = deepspeed.get("zero_optimization", "zero_hpz_partition_size") if stage == 3 else None
    path = Path(accelerate.name) if accelerate.name else None
    json_path = Path(deepspeed.name) if deepspeed.name and deepspeed.name != accelerate.name else None
    return Strategy(
        name=(path or json_path or Path("single")).stem,
        backend=backend,
        sharding=f"zero{stage}" if backend == "deepspeed" and stage in (1, 2, 3) else sharding,
        schedule=schedule,
        distributed=backend == "deepspeed" or kind in ("MULTI_GPU", "FSDP"),
        path=path,
        accelerate=accelerate.content,
        deepspeed_path=json_path,
        deepspeed=deepspeed.content if deepspeed.name else None,
        launcher=launch.launcher,
        world_size=launch.world_size,
        dims=dims,
        offload=tuple(f"{part}:{device}" for part, device in offloads if device in ("cpu", "nvme")),
        nvme_paths=tuple(Path(path) for path in nvme if isinstance(path, str)),
        secondary_partition=_count(secondary, 1),
        context_parallel=_context_parallel(files)[0] if sharding == "fsdp" and not schedule else "",
        fsdp_forward_prefetch=accelerate.get("fsdp_config", "fsdp_forward_prefetch") is True,
        fsdp_reduce_dtype=_text(accelerate.get("fsdp_config", "fsdp_reduce_dtype"), "fp32"),
        tp_sequence_parallel=accelerate.get("parallelism_config", "parallelism_config_tp_sequence_parallel") is True,
        pipeline_partition=_text(deepspeed.get("pipeline", "partition"), "parameters"),
        pipeline_checkpoint_interval=_count(deepspeed.get("pipeline", "activation_checkpoint_interval"), 1),
    )


def _arrangement(files: Files, backend: str, world_size: int) -> tuple[str, ParallelDims]:
    """Return the pipeline's schedule ("" without stages) and the parallel dimensions.

    The dimension that the files leave open takes the processes that are left. It is dp_replicate where PyTorch trains
    without FSDP; otherwise it is dp_shard.
    """
    if backend == "deepspeed":
        schedule = "deepspeed" if "pipeline" in files.deepspeed.content else ""
        stages = _count(files.deepspeed.get("pipeline", "stages"), 1) if schedule else 1
        return schedule, ParallelDims(pp=stages, dp_shard=max(world_size // stages, 1))
    kind = files.accelerate.get("distributed_type")
    cut, stages = (_size(files, "tp"), _size(files, "pp")) if kind in ("MULTI_GPU", "FSDP") else (1, 1)
    schedule = ""
    if stages > 1:
        named = files.accelerate.get("parallelism_config", "parallelism_config_pp_schedule")
        schedule = named if named in SCHEDULES else "1F1B"
    if schedule or kind != "FSDP":
        rest = max(world_size // (stages * cut), 1)
        dims = ParallelDims(pp=stages, tp=cut, **{"dp_shard" if kind != "MULTI_GPU" else "dp_replicate": rest})
        return schedule, dims
    replicas, parts, experts = _size(files, "dp_replicate"), _context_parallel(files)[1], _size(files, "ep")
    # without the experts: the ranks that share them are among those that shard the other weights
    rest = max(world_size // (replicas * parts * cut), 1)
    return schedule, ParallelDims(dp_replicate=replicas, dp_shard=rest, cp=parts, tp=cut, ep=experts)


def _context_parallel(files: Files) -> tuple[str, int]:
    """Return how the ranks of a sequence see each other's keys (Strategy.context_parallel), and how many they are."""
    block = "parallelism_config"
    travels = files.accelerate.get(block, f"{block}_cp_comm_strategy") == "alltoall"  # Accelerate's name for a ring
    for kind, key in (("ulysses", "sp"), ("ring" if travels else "allgather", "cp")):
        if (size := _size(files, key)) > 1:
            return kind, size
    return "", 1


def _size(files: Files, dimension: str) -> int:
    return _count(files.accelerate.get("parallelism_config", f"parallelism_config_{dimension}_size"), 1)


def _text(value: object, default: str) -> str:
    return value if isinstance(value, str) else default


def _count(value: object, default: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    return int(value) if value > 0 and float(value).is_integer() else default
