"""Show the data that a recipe trains on: the first samples with their trained tokens marked, and statistics.

No model is loaded, except for --leak_test: it changes tokens of a row and checks that nothing moves in the model's
outputs for other documents of the row and for tokens to the left.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.cli.commands import Subcommand
from samecurve.config import loader as recipes
from samecurve.config.hub_access import use_cache_without_hub
from samecurve.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, for example recipes/sft.yaml")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values, as for train.py"
    )
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="number of samples to show (default: %(default)s)"
    )
    parser.add_argument(
        "--leak_test", action="store_true", help="test that packed documents, the future and padding are hidden"
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the output as an HTML page")


def run(arguments: argparse.Namespace) -> Subcommand:
    recipe = recipes.load_recipe(arguments.recipe, arguments.overrides, auto=True, schedule=False)
    if recipe.data.streaming:
        raise ConfigurationError(
            "data.streaming: found true, but inspect has to read all documents; set data.streaming=false and "
            "data.path to a single file"
        )
    if line := use_cache_without_hub(recipe):
        print(line, flush=True)
    if arguments.leak_test:
        return Subcommand("samecurve.inference.leak_test", (recipe,))
    title = f"{arguments.recipe}: {recipe.data.name}"
    return Subcommand("samecurve.reports.inspect_console", (recipe, title, arguments.samples, arguments.html))
