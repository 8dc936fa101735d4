"""Show the data a recipe trains on, without a model: the first samples with trained tokens marked, and counts."""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.cli.commands import Work
from samecurve.config import loader as recipes
from samecurve.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="recipe values, as for train.py")
    parser.add_argument("--samples", type=int, default=3, help="number of documents to show")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write the output as an HTML page")


def run(arguments: argparse.Namespace) -> Work:
    recipe = recipes.load_recipe(arguments.recipe, arguments.overrides)
    if recipe.data.streaming:
        raise ConfigurationError(
            "data.streaming: found true, but inspect counts all documents; set it to false and data.path to one file"
        )
    title = f"{arguments.recipe}: {recipe.data.name}"
    return Work("samecurve.reports.inspect_console", (recipe, title, arguments.samples, arguments.html))
