"""Rehearse a run and stop before its first step: a step on the longest rows, an evaluation, a checkpoint, an export.

It starts the processes of the strategy on this machine. For several machines, start it by their launcher:

    torchrun --nnodes 2 ... -m samecurve rehearse RECIPE --strategy STRATEGY

It leaves nothing on the disk. The exit code is 0, or the one with which the run would fail.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from samecurve.bench import jobs
from samecurve.cli.commands import require_positive
from samecurve.distributed.affinity import share_of_cores
from samecurve.launch.ranks import environments
from samecurve.strategy import preflight
from samecurve.strategy.placement import place_strategy
from samecurve.strategy.resolve import STRATEGY_HELP, strategy_path
from samecurve.training import rehearsal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, for example recipes/quickstart.yaml")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values")
    parser.add_argument("--strategy", metavar="STRATEGY", type=strategy_path, help=STRATEGY_HELP)
    parser.add_argument(
        "--num_processes", type=int, metavar="N", help="processes on this machine (default: one per GPU, or 2 without)"
    )


def run(arguments: argparse.Namespace) -> int:
    require_positive(arguments, "num_processes")
    ranks: list[Mapping[str, str]] = [os.environ]
    # under a launcher this process is one rank of many
    if "WORLD_SIZE" not in os.environ and arguments.strategy is not None:
        placed = place_strategy(Path(arguments.strategy), arguments.num_processes or jobs.default_processes())
        if placed.path is not None:
            size = placed.world_size
            threads = os.environ.get("OMP_NUM_THREADS", str(share_of_cores(size)))
            own = {"TORCHELASTIC_RUN_ID": "rehearsal", "OMP_NUM_THREADS": threads}  # as under torchrun
            ranks = [environment | own for environment in environments(size)]
    strategy = ["--strategy", arguments.strategy] if arguments.strategy else []
    plan = preflight.plan([arguments.recipe, *arguments.overrides, *strategy], ranks[0])
    rehearsed = rehearsal.rehearse(plan, ranks)
    if plan.recipe.batch.is_auto and ranks[0].get("RANK", "0") == "0":
        print(f"the largest that fits: batch.micro_batch_size={rehearsed.recipe.batch.micro_batch_size}")
    return 0
