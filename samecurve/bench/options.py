"""Options of a recipe (keys that change how a step is computed): their variants, and the results of measuring them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from samecurve.config.schema import Recipe
from samecurve.reports.chart import relative_difference

# Keys that change how a step is computed; keys that are not in the schema are ignored. A block stands for all of its
# keys whose values are booleans or one of several names.
OPTIONS = (
    "compile",
    "fp8",
    "loss",
    "memory",
    "model.attention",
    "model.kernels",
    "optimizer.name",
    "optimizer.implementation",
    "data.num_workers",
)
_NUMBERS = {"data.num_workers": (1, 2)}
# The first key is rejected unless the override is set too.
_NEEDED = {"memory.selective_save": "memory.activation_checkpointing=selective"}
UNCHANGED = "as it is"


@dataclass(frozen=True)
class Variant:
    """A variant of a recipe. overrides: `key=value`, in addition to those that all variants share."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of one run.

    Attributes:
        tokens_per_second: of all ranks; median of the steps after the warm-up.
        losses: of all steps; None for one without.
        step_seconds: median of the steps after the warm-up.
    """

    tokens_per_second: float
    peak_memory_gib: float
    losses: tuple[float | None, ...]
    step_seconds: float = 0.0

    @classmethod
    def from_metrics(cls, metrics: Sequence[Mapping[str, Any]], warm_up_steps: int) -> MeasuredRun:
        steady = metrics[warm_up_steps:]
        return cls(
            median(record["tokens_per_second"] for record in steady),
            max(record["peak_memory_gib"] for record in metrics),
            tuple(record["loss"] for record in metrics),
            median(record["step_seconds"] for record in steady),
        )


@dataclass(frozen=True)
class Verdict:
    """Comparison of a variant with the unchanged recipe.

    Attributes:
        tokens_per_second: median of the rounds.
        ratio, lowest, highest: tokens/s divided by that of the unchanged recipe in the same round; median, minimum and
            maximum over the rounds.
        peak_memory_gib: highest of the rounds.
        memory_ratio: ratio of the highest peaks.
        loss_difference: largest relative difference of any step, in the last round; infinite where one has no loss.
        step_seconds: median of the rounds.
    """

    variant: Variant
    tokens_per_second: float
    ratio: float
    lowest: float
    highest: float
    peak_memory_gib: float
    memory_ratio: float
    loss_difference: float
    step_seconds: float


def variants(recipe: Recipe, keys: Sequence[str] = OPTIONS) -> list[Variant]:
    """List the unchanged recipe and every variant that changes one option, together with the keys that it requires."""
    listed = [Variant(UNCHANGED)]
    for key in keys:
        for dotted, values in _options(key):
            now = attrgetter(dotted)(recipe)
            for value in (value for value in values if value != now):
                is_word = value is None or isinstance(value, bool)
                shown = json.dumps(value) if is_word else value  # as YAML, too: null, true, false
                overrides = *filter(None, [_NEEDED.get(dotted)]), f"{dotted}={shown}"
                listed.append(Variant(" ".join(overrides), overrides))
    return listed


def _options(key: str) -> Iterator[tuple[str, tuple]]:
    """Yield (dotted key, its values) for a key, or for each key of a block that has a few values."""
    annotation: Any = Recipe
    for part in key.split("."):
        fields = _fields(annotation)
        if part not in fields:
            return
        annotation = fields[part].annotation
    if inside := _fields(annotation):
        for name in inside:
            yield from _options(f"{key}.{name}")
    elif values := _NUMBERS.get(key) or _few(annotation):
        yield key, values


def _fields(annotation: Any) -> dict:
    return annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, BaseModel) else {}


def _few(annotation: Any) -> tuple:
    """List all values of a field that is a boolean, one of several names, or an optional one of these; else ()."""
    if annotation is bool:
        return True, False
    if annotation is type(None):
        return (None,)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        parts = [_few(part) for part in get_args(annotation)]
        return tuple(value for part in parts for value in part) if all(parts) else ()
    return ()


def verdicts(rounds: Mapping[str, Sequence[MeasuredRun]], among: Sequence[Variant]) -> list[Verdict]:
    """Compare variants with the unchanged recipe.

    Args:
        rounds: the measurement of each round, by variant name. Includes UNCHANGED; all have the same number of rounds.
        among: the variants to compare.
    """
    base = rounds[UNCHANGED]
    memory = max(run.peak_memory_gib for run in base)
    listed = []
    for variant in among:
        runs = rounds[variant.name]
        ratios = [run.tokens_per_second / other.tokens_per_second for run, other in zip(runs, base, strict=True)]
        peak = max(run.peak_memory_gib for run in runs)
        listed.append(
            Verdict(
                variant,
                median(run.tokens_per_second for run in runs),
                median(ratios),
                min(ratios),
                max(ratios),
                peak,
                peak / memory,
                _largest_difference(runs[-1].losses, base[-1].losses),
                median(run.step_seconds for run in runs),
            )
        )
    return listed


def _largest_difference(losses: Sequence[float | None], expected: Sequence[float | None]) -> float:
    if [loss is None for loss in losses] != [loss is None for loss in expected]:
        return math.inf
    differences = map(relative_difference, losses, expected)
    return max((difference for difference in differences if difference is not None), default=math.nan)
