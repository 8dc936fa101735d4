"""Prove that a recipe or a training script trains the same under each strategy, or find where it does not.

A recipe is made small: its twin trains under each strategy on this machine's CPU, is killed and goes on under the next
one, and is compared with a plain loop of transformers and torch, judge.py in the output folder.

A script runs as it is, in processes on this machine's CPU: in one, and under each strategy. In each process every
step is recorded: rows, loss, gradients, norm, learning rates and weights. They are compared with one process that reads
the same rows. No line of the script changes; dropout is switched off.

The exit code is 0 if all strategies train the same, else 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.bench import jobs
from samecurve.cli.commands import Subcommand, require_positive
from samecurve.config.loader import load_recipe
from samecurve.errors import ConfigurationError
from samecurve.specs.environment import shipped_file

STRATEGIES = "ddp,fsdp,zero2,zero3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="RECIPE_OR_SCRIPT", help="a recipe, or a script of any trainer")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="key=value of a recipe; of a script, after --")
    parser.add_argument("--strategies", default=STRATEGIES, metavar="a,b,c", help="or all (default: %(default)s)")
    parser.add_argument("--num_processes", type=int, default=2, metavar="N", help="per run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="of a script (default: %(default)s)")
    parser.add_argument("--to_end", action="store_true", help="let a script end; judge its exports and evaluations")
    parser.add_argument(
        "--resume_with", metavar="ARGUMENTS", help="of a script, to go on from what it saved; judges that"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: runs/prove/NAME")


def run(arguments: argparse.Namespace) -> int | Subcommand:
    require_positive(arguments, "num_processes", "steps")
    path, is_recipe = str(arguments.script), arguments.script.suffix in (".yaml", ".yml", ".json")
    if not Path(shipped_file(path) if is_recipe else path).is_file():
        raise ConfigurationError(f"{path}: no such file; give a recipe or a training script")
    named = [name for name in arguments.strategies.split(",") if name and arguments.strategies != "all"]
    chosen = jobs.jobs(named, arguments.num_processes)
    output = arguments.output or Path("runs/prove") / arguments.script.stem
    if is_recipe:
        load_recipe(path, arguments.arguments, auto=True)  # reports every problem before torch is imported
        return Subcommand("samecurve.prove.recipe", (path, arguments.arguments, chosen, bool(named), output))
    steps = 0 if arguments.to_end else arguments.steps
    return Subcommand(
        "samecurve.prove.report", (arguments.script, arguments.arguments, chosen, steps, arguments.resume_with, output)
    )
