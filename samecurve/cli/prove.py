"""Prove that a training script trains the same under each strategy, or find where it does not.

The script runs as it is, in processes on this machine's CPU: in one, and under each strategy. In each process every
step is recorded: rows, loss, gradients, norm, learning rates and weights. They are compared with one process that reads
the same rows. No line of the script changes; dropout is switched off.

The exit code is 0 if all strategies train the same, else 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.bench import jobs
from samecurve.cli.commands import Subcommand, require_positive
from samecurve.errors import ConfigurationError

STRATEGIES = "ddp,fsdp,zero2,zero3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="SCRIPT.py", help="of Accelerate, Trainer, TRL or plain PyTorch")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of the script, after --")
    parser.add_argument("--strategies", default=STRATEGIES, metavar="a,b,c", help="default: %(default)s")
    parser.add_argument("--num_processes", type=int, default=2, metavar="N", help="per run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="updates of each run (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: runs/prove/SCRIPT")


def run(arguments: argparse.Namespace) -> int | Subcommand:
    require_positive(arguments, "num_processes", "steps")
    if not arguments.script.is_file():
        raise ConfigurationError(f"{arguments.script}: no such file; give a training script")
    chosen = jobs.jobs([name for name in arguments.strategies.split(",") if name], arguments.num_processes)
    output = arguments.output or Path("runs/prove") / arguments.script.stem
    return Subcommand(
        "samecurve.prove.report", (arguments.script, arguments.arguments, chosen, arguments.steps, output)
    )
