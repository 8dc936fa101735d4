"""Measure a recipe's step with each lever on and off, by repeating the same short job in separate processes.

Every round runs the unchanged recipe and each variant once, so that other load on the machine affects all of them
alike. A lever is a recipe key that changes how a step is computed: attention, recomputation, compilation, the
optimizer. Side effects show in the loss. --variant may also set keys of the strategy's files, such as
fsdp_config.fsdp_reshard_after_forward=false or zero_optimization.stage3_prefetch_bucket_size=0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.bench import jobs, levers, printing
from samecurve.cli.commands import Work, repository_root
from samecurve.config import loader as recipes
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="recipe values for every variant")
    parser.add_argument(
        "--strategy", default="single", metavar="NAME", help="a name in configs/ (default: %(default)s)"
    )
    parser.add_argument("--num_processes", type=int, help="default: the number of GPUs, or 2 without a GPU")
    keys = "keys or blocks of keys; default: all that there are; none: --variant only"
    parser.add_argument("--levers", metavar="a,b", help=keys)
    more = "one more, of your own: recipe keys, and keys of the strategy's files; may be repeated"
    parser.add_argument("--variant", action="append", default=[], metavar='"key=value key=value"', help=more)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: %(default)s)")
    parser.add_argument(
        "--warm_up", type=int, default=5, help="steps left out of the measurement (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="default: runs/bench_step/RECIPE")
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> Work:
    repository_root()
    if arguments.rounds < 1 or not 0 <= arguments.warm_up < arguments.steps:
        raise ConfigurationError("--rounds has to be above 0, and --warm_up below --steps")
    # For a large model the export takes longer than the measured steps.
    settings = jobs.shortened(arguments.recipe, arguments.overrides, arguments.steps, **{"export.enabled": "false"})
    (job,) = jobs.jobs([Path(arguments.strategy).stem], arguments.num_processes or jobs.default_processes())
    found = _variants(recipes.load_recipe(arguments.recipe, settings), arguments.levers)
    found += [levers.Variant(text, tuple(text.split())) for text in arguments.variant]
    return Work("samecurve.bench.step", (arguments, job, settings, found))


def _variants(recipe: Recipe, given: str | None) -> list[levers.Variant]:
    """List the variants for --levers. Raises ConfigurationError for a key that is not a lever."""
    if given in (None, "none"):
        return levers.variants(recipe, levers.LEVERS if given is None else ())
    keys = given.split(",")
    idle = [key for key in keys if len(levers.variants(recipe, [key])) == 1]
    if idle:
        raise ConfigurationError(
            f"--levers: found {idle[0]}, which is no recipe key with a few values, nor a block of such; there are "
            f"{', '.join(variant.name for variant in levers.variants(recipe)[1:])}"
        )
    return levers.variants(recipe, keys)
