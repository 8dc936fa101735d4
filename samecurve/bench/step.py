"""Benchmark of a recipe's step with each option changed: runs of all variants in rounds, and their comparison."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from samecurve.bench import jobs, printing, timing
from samecurve.bench.jobs import StrategyJob
from samecurve.bench.options import UNCHANGED, MeasuredRun, Variant, Verdict, verdicts
from samecurve.config.documents import Document, format_problems
from samecurve.config.inheritance import apply_override, latest_overrides
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.run.run_directory import read_metrics
from samecurve.storage.atomic import storage_errors
from samecurve.storage.terminal import TextConsole
from samecurve.strategy.accelerate_keys import ACCELERATE
from samecurve.strategy.deepspeed_keys import DEEPSPEED
from samecurve.strategy.translation import read_as_written

COLUMNS = "variant", "tokens/s", "ratio", "lowest", "highest", "memory GiB", "ratio", "loss difference"


def run(arguments: argparse.Namespace, job: StrategyJob, settings: Sequence[str], among: Sequence[Variant]) -> int:
    """Run the command `bench step`.

    Args:
        settings: overrides of the recipe, for every variant.
        among: the variants. One that fails is reported.

    Raises:
        ConfigurationError: the unchanged recipe does not run.
    """
    facts = timing.describe_environment(timing.default_device())
    printing.print_line(timing.environment_line(facts, ("torch", "transformers", "accelerate", "deepspeed")))
    output = arguments.output or Path("runs/bench_step") / Path(arguments.recipe).stem
    variants: dict[Variant, tuple[StrategyJob, list[str]]] = {}
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        for nth, variant in enumerate(among):
            keys = [override for override in variant.overrides if is_key(override)]  # of the strategy's files
            changed = job
            if keys:
                if job.path is None:
                    text = f"found {keys[0]}, but {job.name} has no strategy file; choose another --strategy"
                    raise ConfigurationError(f"--variant: {text}")
                changed = replace(job, path=write_changed(job.path, keys, output / f"{nth:02d}"))
            variants[variant] = changed, [override for override in variant.overrides if override not in keys]
    rounds, reasons = _measure(variants, arguments, settings, output)
    if UNCHANGED in reasons:
        raise ConfigurationError(f"{arguments.recipe}: the unchanged recipe fails: {reasons[UNCHANGED]}")
    measured = verdicts(rounds, [variant for variant in among if variant.name not in reasons])
    _show(measured, job, arguments)
    for name, reason in reasons.items():
        printing.print_line(f"{name}: failed: {reason}")
    numbers = {"recipe": arguments.recipe, "overrides": settings, "strategy": job.name, "processes": job.world_size}
    numbers |= {
        "rounds": arguments.rounds,
        "variants": [asdict(verdict) for verdict in measured],
        "not_measured": reasons,
    }
    printing.write_json_file(arguments.json, "step", facts, **numbers)
    return 0


def _measure(
    variants: Mapping[Variant, tuple[StrategyJob, list[str]]],
    arguments: argparse.Namespace,
    settings: Sequence[str],
    output: Path,
) -> tuple[dict[str, list[MeasuredRun]], dict[str, str]]:
    """Run all variants in rounds. variants: each with its job and overrides.

    Returns:
        (measurements of the rounds by variant name, reasons of failures by variant name).
    """
    rounds: dict[str, list[MeasuredRun]] = {variant.name: [] for variant in variants}
    reasons: dict[str, str] = {}
    # variants inside rounds, so that a busy machine slows all variants of a round alike
    for nth in range(arguments.rounds):
        for index, (variant, (job, overrides)) in enumerate(variants.items()):
            if variant.name in reasons:
                continue
            directory = output / f"{index:02d}_{nth}"
            label = f"round {nth + 1} of {arguments.rounds}, {variant.name}"
            command = jobs.command(job, arguments.recipe, latest_overrides([*settings, *overrides]), directory)
            with TextConsole().status(label):
                outcome = jobs.run(job, command, directory, lambda steps: None)
            if outcome.reason:
                reasons[variant.name] = outcome.reason
                printing.print_line(f"{label}: {outcome.reason}")
                continue
            metrics = read_metrics(outcome.directory)
            rounds[variant.name].append(MeasuredRun.from_metrics(metrics, arguments.warmup_steps))
            printing.print_line(f"{label}: {rounds[variant.name][-1].tokens_per_second:,.0f} tokens/s")
    return rounds, reasons


def _show(measured: Sequence[Verdict], job: StrategyJob, arguments: argparse.Namespace) -> None:
    rows = [
        [
            verdict.variant.name,
            f"{verdict.tokens_per_second:,.0f}",
            *(f"{ratio:.2f}" for ratio in (verdict.ratio, verdict.lowest, verdict.highest)),
            f"{verdict.peak_memory_gib:.2f}",
            f"{verdict.memory_ratio:.2f}",
            f"{verdict.loss_difference:.1e}",
        ]
        for verdict in measured
    ]
    processes = f"{job.world_size} process{'es' * (job.world_size > 1)}"
    title = f"{arguments.recipe}, {job.name}, {processes}, {arguments.rounds} rounds of {arguments.steps} steps"
    printing.print_table(COLUMNS, rows, f"{title}; ratios to the unchanged recipe in the same round")


def is_key(argument: str) -> bool:
    """Whether `key.path=value` is for a strategy's file. Names of the recipe take precedence."""
    head = _head(argument)
    return head not in Recipe.model_fields and (head in ACCELERATE or head in DEEPSPEED)


def write_changed(path: Path, arguments: Sequence[str], folder: Path) -> Path:
    """Write copies of the strategy's YAML and JSON with changed keys to `folder`, under the same file names.

    Args:
        arguments: `key.path=value`. The run validates keys and values.

    Returns:
        The file to use instead of `path`.

    Raises:
        ConfigurationError: a key belongs to a file that the strategy does not have.
    """
    files = read_as_written(str(path))
    for argument in arguments:
        document = files.accelerate if _head(argument) in ACCELERATE else files.deepspeed
        if not document.name:
            kind = "Accelerate YAML" if document is files.accelerate else "DeepSpeed JSON"
            raise ConfigurationError(f"{argument}: a key of a {kind}, but {path} has none; choose another --strategy")
        apply_override(document, argument)
    problems = files.accelerate.problems + files.deepspeed.problems
    if problems:
        raise ConfigurationError(format_problems(problems))
    folder.mkdir(parents=True, exist_ok=True)
    if not files.deepspeed.name:
        return _written(files.accelerate, folder)
    json_path = _written(files.deepspeed, folder)
    if not files.accelerate.name:
        return json_path
    # the YAML would still name the unchanged JSON
    files.accelerate.content["deepspeed_config"]["deepspeed_config_file"] = str(json_path)
    return _written(files.accelerate, folder)


def _head(argument: str) -> str:
    return argument.partition("=")[0].partition(".")[0]


def _written(document: Document, folder: Path) -> Path:
    path = folder / Path(document.name).name
    path.write_text(json.dumps(document.content, indent=2) + "\n", encoding="utf-8")  # JSON is YAML
    return path.absolute()
