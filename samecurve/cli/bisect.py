"""Find where two trainings part: a script under a strategy and in one process, or a script and another one.

The answer is one paragraph: the first step, and in it the first of rows, inputs, outputs of modules, loss, gradients,
their reduction over ranks, norm, update and weights; with the rank, the line of code, both numbers, and what rounding
alone would change. Everything runs on this machine's CPU, and no line of the scripts changes; dropout is switched off.

The exit code is 0 if the trainings do not part, else 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.bench import jobs
from samecurve.cli.commands import Subcommand, require_positive
from samecurve.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a training script of any trainer")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of the script, after --")
    pair = parser.add_mutually_exclusive_group(required=True)
    pair.add_argument("--strategy", metavar="STRATEGY", help="in configs/, or a file: compare it with one process")
    pair.add_argument(
        "--against", type=Path, metavar="SCRIPT", help="compare one process of it, such as an older version"
    )
    parser.add_argument("--num_processes", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: runs/bisect/NAME")


def run(arguments: argparse.Namespace) -> Subcommand:
    require_positive(arguments, "num_processes", "steps")
    for script in filter(None, (arguments.script, arguments.against)):
        if not script.is_file():
            raise ConfigurationError(f"{script}: no such file; give a training script")
    (job,) = jobs.jobs([arguments.strategy], arguments.num_processes) if arguments.strategy else [None]
    output = arguments.output or Path("runs/bisect") / arguments.script.stem
    words = (arguments.script, arguments.arguments, job, arguments.against, arguments.steps, output)
    return Subcommand("samecurve.prove.bisect", words)
