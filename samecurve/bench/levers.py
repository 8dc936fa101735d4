"""A recipe's levers, the keys that change how a step is computed: which variants there are, and what their runs say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from samecurve.config.schema import Recipe
from samecurve.reports.chart import relative_differences

# Keys that change how a step is computed. One that the schema does not have is no lever; a block stands for those of
# its keys that are true or false, or one of several names.
LEVERS = (
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
# Without the one the other is refused.
_NEEDED = {"memory.selective_save": "memory.activation_checkpointing=selective"}
UNCHANGED = "as it is"


@dataclass(frozen=True)
class Variant:
    """overrides: `key=value`, beside those that all variants share."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """One run. losses: of its steps. tokens_per_second, step_seconds: the median of its steps, without the first ones;
    tokens are those of all ranks."""

    tokens_per_second: float
    peak_memory_gib: float
    losses: tuple[float, ...]
    step_seconds: float = 0.0

    @classmethod
    def from_metrics(cls, metrics: Sequence[Mapping[str, Any]], warm_up_steps: int) -> Measured:
        steady = metrics[warm_up_steps:]
        return cls(
            median(record["tokens_per_second"] for record in steady),
            max(record["peak_memory_gib"] for record in metrics),
            tuple(record["loss"] for record in metrics),
            median(record["step_seconds"] for record in steady),
        )


@dataclass(frozen=True)
class Verdict:
    """ratio: tokens/s over the unchanged recipe's of the same round, the median, lowest and highest of the rounds.

    step_seconds: the median of the rounds. memory_ratio: of the highest peaks. loss_difference: the largest
    relative one of any step, in the last round.
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


def variants(recipe: Recipe, keys: Sequence[str] = LEVERS) -> list[Variant]:
    """The recipe as it is, and with each other value of each lever, one at a time, with what it cannot be without."""
    found = [Variant(UNCHANGED)]
    for key in keys:
        for dotted, values in _levers(key):
            now = _value(recipe, dotted)
            for value in (value for value in values if value != now):
                overrides = *filter(None, [_NEEDED.get(dotted)]), f"{dotted}={_shown(value)}"
                found.append(Variant(" ".join(overrides), overrides))
    return found


def _levers(key: str) -> Iterator[tuple[str, tuple]]:
    """(dotted key, its values) of a key, or of each key of a block that has a few."""
    annotation: Any = Recipe
    for part in key.split("."):
        fields = _fields(annotation)
        if part not in fields:
            return
        annotation = fields[part].annotation
    if inside := _fields(annotation):
        for name in inside:
            yield from _levers(f"{key}.{name}")
    elif values := _NUMBERS.get(key) or _few(annotation):
        yield key, values


def _fields(annotation: Any) -> dict:
    return annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, BaseModel) else {}


def _few(annotation: Any) -> tuple:
    """All values of a field that is true or false, one of several names, or one of them or nothing."""
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


def _value(recipe: Recipe, dotted: str) -> Any:
    found: Any = recipe
    for part in dotted.split("."):
        found = getattr(found, part)
    return found


def _shown(value: Any) -> str:
    """As YAML reads it on the command line."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def verdicts(rounds: Mapping[str, Sequence[Measured]], among: Sequence[Variant]) -> list[Verdict]:
    """rounds: by the variant's name, what each round found; UNCHANGED is among them, and all have as many."""
    base = rounds[UNCHANGED]
    memory = max(run.peak_memory_gib for run in base)
    found = []
    for variant in among:
        runs = rounds[variant.name]
        ratios = [run.tokens_per_second / other.tokens_per_second for run, other in zip(runs, base, strict=True)]
        peak = max(run.peak_memory_gib for run in runs)
        differences = relative_differences(runs[-1].losses, base[-1].losses)
        found.append(
            Verdict(
                variant,
                median(run.tokens_per_second for run in runs),
                median(ratios),
                min(ratios),
                max(ratios),
                peak,
                peak / memory,
                max((each for each in differences if each is not None), default=0.0),
                median(run.step_seconds for run in runs),
            )
        )
    return found
