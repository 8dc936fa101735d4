"""Measure a recipe's step with each option on and off, in separate short runs.

An option is a recipe key that changes how a step is computed: attention, recomputation, compilation, the optimizer. The
table also shows how much it changes the loss. Every round runs the unchanged recipe and each variant once, so that
other load on the machine affects all of them alike.

--variant may also set keys of the strategy's files:

    --variant fsdp_config.fsdp_reshard_after_forward=false
    --variant zero_optimization.stage3_prefetch_bucket_size=0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from samecurve.bench import jobs, options, printing
from samecurve.cli.commands import Subcommand, require_positive
from samecurve.config import loader as recipes
from samecurve.errors import ConfigurationError
from samecurve.strategy.resolve import STRATEGY_HELP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, for example recipes/pretrain.yaml")
    parser.add_argument(
        "overrides", metavar="key.path=value", nargs="*", default=[], help="recipe values for every variant"
    )
    parser.add_argument(
        "--strategy", default="single", metavar="STRATEGY", help=f"{STRATEGY_HELP} (default: %(default)s)"
    )
    parser.add_argument(
        "--num_processes", type=int, metavar="N", help="processes per run (default: the number of GPUs, or 2 without)"
    )
    keys = "recipe keys, or blocks of them (default: all options); none: only the variants of --variant"
    parser.add_argument("--options", metavar="a,b", help=keys)
    more = "another variant, of recipe keys and keys of the strategy's files; may be repeated"
    parser.add_argument("--variant", action="append", default=[], metavar='"KEY=VALUE ..."', help=more)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of each run (default: %(default)s)")
    parser.add_argument(
        "--warmup_steps",
        type=int,
        default=5,
        metavar="N",
        help="first steps that are not measured (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="runs of each variant (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder of the runs (default: runs/bench_step/RECIPE)"
    )
    printing.add_json_option(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    require_positive(arguments, "num_processes")
    if arguments.rounds < 1 or not 0 <= arguments.warmup_steps < arguments.steps:
        given = f"--rounds {arguments.rounds} --warmup_steps {arguments.warmup_steps} --steps {arguments.steps}"
        raise ConfigurationError(f"{given}: --rounds must be at least 1, and --warmup_steps less than --steps")
    # For a large model the export takes longer than the measured steps.
    settings = jobs.shortened(arguments.recipe, arguments.overrides, arguments.steps, **{"export.enabled": "false"})
    (job,) = jobs.jobs([arguments.strategy], arguments.num_processes or jobs.default_processes())
    recipe = recipes.load_recipe(arguments.recipe, settings)
    keys: Sequence[str] = options.OPTIONS
    if arguments.options == "none":
        keys = ()
    elif arguments.options is not None:
        keys = arguments.options.split(",")
        idle = [key for key in keys if len(options.variants(recipe, [key])) == 1]
        if idle:
            raise ConfigurationError(
                f"--options: found {idle[0]}, but it must be a recipe key with a few values, or a block of such keys: "
                f"{', '.join(variant.name for variant in options.variants(recipe)[1:])}"
            )
    variants = options.variants(recipe, keys)
    variants += [options.Variant(text, tuple(text.split())) for text in arguments.variant]
    return Subcommand("samecurve.bench.step", (arguments, job, settings, variants))
