"""Measure the peak speed of this device: matrix multiplications by precision, and memory copies.

With RECIPE, the multiplications of that model's layers are measured, too.
"""

from __future__ import annotations

import argparse

from samecurve.bench import printing
from samecurve.cli.commands import Subcommand, require_positive
from samecurve.config import loader as recipes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe whose layers are measured, too")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values")
    parser.add_argument(
        "--precisions", metavar="a,b", help="some of fp32, tf32, bf16, fp16 (default: all; on a CPU all but tf32)"
    )
    parser.add_argument(
        "--sizes", metavar="a,b", help="sizes of the square matrices (default: powers of two that suit the device)"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="time to measure each number (default: %(default)s)")
    printing.add_json_option(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    require_positive(arguments, "seconds")
    sizes = printing.parse_integers("--sizes", arguments.sizes, least=1)
    recipe = recipes.load_recipe(arguments.recipe, arguments.overrides) if arguments.recipe else None
    return Subcommand("samecurve.bench.matmul", (arguments, sizes, recipe))
