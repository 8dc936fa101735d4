"""Measure the peak of this device: multiplication of squares and of a recipe's layers by precision, and copies."""

from __future__ import annotations

import argparse

from samecurve.bench import printing
from samecurve.cli.commands import Work
from samecurve.config import loader as recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="also measure the shapes of this recipe's layers")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="recipe values")
    parser.add_argument(
        "--precisions", metavar="a,b", help="from fp32, tf32, bf16, fp16; default: those that the device supports"
    )
    parser.add_argument("--sizes", metavar="a,b", help="widths of the square matrices")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="measuring time of each number (default: %(default)s)"
    )
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> Work:
    recipe = recipes.load_recipe(arguments.recipe, arguments.overrides) if arguments.recipe else None
    return Work("samecurve.bench.matmul", (arguments, recipe))
