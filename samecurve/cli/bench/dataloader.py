"""Measure how many rows per second a recipe's data loader delivers, by number of workers (data.num_workers).

The last line names the smallest number of workers that is enough.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.bench import printing
from samecurve.cli.commands import Subcommand, require_positive
from samecurve.config import loader as recipes
from samecurve.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, for example recipes/pretrain.yaml")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values")
    parser.add_argument("--num_workers", metavar="a,b", help="default: 0,1,2,4,... up to the number of cores")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time to measure each number of workers (default: %(default)s)"
    )
    parser.add_argument(
        "--data_parallel_size",
        type=int,
        default=1,
        metavar="N",
        help="data-parallel size of the run; the benchmark reads the rows of one rank (default: %(default)s)",
    )
    processes = "processes of the run on each host; the benchmark uses the cores of one of them (default: %(default)s)"
    parser.add_argument("--processes_per_node", type=int, default=1, metavar="N", help=processes)
    need = parser.add_mutually_exclusive_group()
    need.add_argument(
        "--run", metavar="RUN", type=Path, help="a run of this recipe; the loader has to keep up with its steps"
    )
    need.add_argument("--needed", metavar="X", type=float, help="rows per second that each rank needs")
    printing.add_json_option(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    recipe = recipes.load_recipe(arguments.recipe, arguments.overrides)
    if recipe.data.streaming:
        text = "found true, but streamed rows are read by one thread, whatever the number of workers"
        raise ConfigurationError(f"data.streaming: {text}; set data.streaming=false")
    require_positive(arguments, "data_parallel_size", "processes_per_node", "seconds", "needed")
    return Subcommand("samecurve.bench.dataloader", (arguments, recipe))
