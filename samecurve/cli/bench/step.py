"""A recipe's step with each lever on and off: the same short job again and again, each in processes of its own.

Every round runs the recipe as it stands and each variant once, so what else the machine does meets all of them alike.
A lever is a recipe key that changes how a step is computed: attention, recomputation, compilation, the optimizer. What
else it changes is seen in the loss. A variant of one's own may also name keys of the strategy's files, such as
fsdp_config.fsdp_reshard_after_forward=false or zero_optimization.stage3_prefetch_bucket_size=0.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from samecurve.bench import jobs, printing
from samecurve.cli.commands import repository_root
from samecurve.config import loader as recipes
from samecurve.config.overrides import latest_overrides
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.storage.atomic import storage_errors

SCRIPT = ("-m", "samecurve.bench.training")
COLUMNS = "variant", "tokens/s", "ratio", "lowest", "highest", "memory GiB", "ratio", "loss difference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="recipe values, for every variant")
    parser.add_argument("--strategy", default="single", metavar="NAME", help="of configs/ (default: %(default)s)")
    parser.add_argument("--num_processes", type=int, help="default: the number of GPUs, 2 without one")
    levers = "keys or blocks of keys; default: all that there are; none: --variant only"
    parser.add_argument("--levers", metavar="a,b", help=levers)
    more = "one more, of your own: recipe keys, and keys of the strategy's files; may be repeated"
    parser.add_argument("--variant", action="append", default=[], metavar='"key=value key=value"', help=more)
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: %(default)s)")
    parser.add_argument("--warm_up", type=int, default=5, help="steps that are not counted (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="default: runs/bench_step/RECIPE")
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigurationError where the recipe as it is does not run; a variant that does not is told."""
    repository_root()
    if arguments.rounds < 1 or not 0 <= arguments.warm_up < arguments.steps:
        raise ConfigurationError("--rounds has to be above 0, and --warm_up below --steps")
    settings = jobs.shortened(arguments.recipe, arguments.overrides, arguments.steps)
    (job,) = jobs.jobs([Path(arguments.strategy).stem], arguments.num_processes or jobs.default_processes())

    found = _variants(recipes.load_recipe(arguments.recipe, settings), arguments.levers)

    from samecurve.bench import step, timing

    facts = timing.environment(timing.default_device())
    printing.say(timing.told(facts, ("torch", "transformers", "accelerate", "deepspeed")))
    found += [step.Variant(text, tuple(text.split())) for text in arguments.variant]
    output = arguments.output or Path("runs/bench_step") / Path(arguments.recipe).stem
    with storage_errors(output):
        variants = {variant: _changed(job, variant, output / f"{nth:02d}") for nth, variant in enumerate(found)}
    rounds, reasons = _measure(variants, arguments, settings, output)
    if step.UNCHANGED in reasons:
        raise ConfigurationError(f"the recipe itself does not run: {reasons[step.UNCHANGED]}")
    verdicts = step.verdicts(rounds, [variant for variant in found if variant.name not in reasons])
    _show(verdicts, job, arguments)
    for name, reason in reasons.items():
        printing.say(f"{name}: did not run: {reason}")
    numbers = {"recipe": arguments.recipe, "overrides": settings, "strategy": job.name, "processes": job.world_size}
    numbers |= {"rounds": arguments.rounds, "variants": [asdict(each) for each in verdicts], "not_measured": reasons}
    printing.write(arguments.json, "step", facts, **numbers)
    return 0


def _variants(recipe: Recipe, given: str | None) -> list:
    """given: --levers. Raises ConfigurationError for a key that was asked for and is none."""
    from samecurve.bench import step

    if given in (None, "none"):
        return step.variants(recipe, step.LEVERS if given is None else ())
    keys = given.split(",")
    idle = [key for key in keys if len(step.variants(recipe, [key])) == 1]
    if idle:
        raise ConfigurationError(
            f"--levers: found {idle[0]}, which is no recipe key with a few values, nor a block of such; there are "
            f"{', '.join(variant.name for variant in step.variants(recipe)[1:])}"
        )
    return step.variants(recipe, keys)


def _measure(variants: Mapping, arguments, settings: Sequence[str], output: Path) -> tuple[dict, dict]:
    """({variant: what each round found}, {variant: why it did not run}). variants: each with its job and overrides."""
    from samecurve.bench.step import Measured

    rounds: dict[str, list[Measured]] = {variant.name: [] for variant in variants}
    reasons: dict[str, str] = {}
    for nth in range(arguments.rounds):
        for index, (variant, (job, overrides)) in enumerate(variants.items()):
            if variant.name in reasons:
                continue
            directory = output / f"{index:02d}_{nth}"
            label = f"round {nth + 1} of {arguments.rounds}, {variant.name}"
            outcome = _run(job, arguments.recipe, latest_overrides([*settings, *overrides]), directory, label)
            if outcome.reason:
                reasons[variant.name] = outcome.reason
                printing.say(f"{label}: {outcome.reason}")
                continue
            rounds[variant.name].append(Measured.from_metrics(outcome.metrics, arguments.warm_up))
            printing.say(f"{label}: {rounds[variant.name][-1].tokens_per_second:,.0f} tokens/s")
    return rounds, reasons


def _changed(job, variant, folder: Path) -> tuple:
    """(the job under the variant's strategy, whose files go to `folder`; its overrides of the recipe).

    Raises ConfigurationError for a key of a file that there is not.
    """
    from samecurve.bench import strategy_variants

    folder.parent.mkdir(parents=True, exist_ok=True)
    keys = [each for each in variant.overrides if strategy_variants.is_key(each)]
    if keys and job.path is None:
        raise ConfigurationError(f"--variant: found {keys[0]}, but {job.name} has no processes to spread over")
    overrides = [each for each in variant.overrides if each not in keys]
    return (replace(job, path=strategy_variants.changed(job.path, keys, folder)) if keys else job), overrides


def _run(job, recipe: str, settings: Sequence[str], directory: Path, label: str) -> jobs.Outcome:
    with printing.console().status(label):
        return jobs.run(job, jobs.command(job, recipe, settings, directory, SCRIPT), directory, lambda steps: None)


def _show(verdicts: Sequence, job, arguments: argparse.Namespace) -> None:
    rows = [
        [
            each.variant.name,
            f"{each.tokens_per_second:,.0f}",
            *(f"{ratio:.2f}" for ratio in (each.ratio, each.lowest, each.highest)),
            f"{each.peak_memory_gib:.2f}",
            f"{each.memory_ratio:.2f}",
            f"{each.loss_difference:.1e}",
        ]
        for each in verdicts
    ]
    processes = f"{job.world_size} process{'es' * (job.world_size > 1)}"
    title = f"{arguments.recipe}, {job.name}, {processes}, {arguments.rounds} rounds of {arguments.steps} steps"
    printing.show(COLUMNS, rows, f"{title}; ratios are to the recipe as it is, in the same round")
