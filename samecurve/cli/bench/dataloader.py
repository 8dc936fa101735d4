"""Measure rows per second of a recipe's data by number of workers (data.num_workers), and how many are enough."""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.bench import printing
from samecurve.cli.commands import Work
from samecurve.config import loader as recipes
from samecurve.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="recipe values")
    parser.add_argument("--workers", metavar="a,b", help="default: 0, 1, 2, 4, ... up to the number of cores")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="measuring time of each number of workers (default: %(default)s)"
    )
    parser.add_argument(
        "--data_parallel_size", type=int, default=1, help="data-parallel size of the run; one rank's share is read"
    )
    processes = "of the run, which share the host's cores; the loader gets the share of one (default: %(default)s)"
    parser.add_argument("--processes_per_host", type=int, default=1, metavar="N", help=processes)
    need = parser.add_mutually_exclusive_group()
    need.add_argument(
        "--run", metavar="RUN", type=Path, help="a run of the recipe, whose consumption is the requirement"
    )
    need.add_argument("--needed", metavar="ROWS_PER_SECOND", type=float, help="the requirement of each rank")
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> Work:
    recipe = recipes.load_recipe(arguments.recipe, arguments.overrides)
    if recipe.data.streaming:
        text = "found true, but the rows of a stream are made by a thread of their own, whatever the number of workers"
        raise ConfigurationError(f"data.streaming: {text}; set it to false")
    size, processes = arguments.data_parallel_size, arguments.processes_per_host
    for option, found in (("data_parallel_size", size), ("processes_per_host", processes)):
        if found < 1:
            raise ConfigurationError(f"--{option}: found {found}, a number above 0 is needed")
    return Work("samecurve.bench.dataloader", (arguments, recipe))
