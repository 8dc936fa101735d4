"""Predicted step time and memory beside the measured ones, as text, from `predicted` of run.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

QUANTITIES = {"step_seconds": ("step", "s"), "peak_memory_gib": ("peak memory, rank 0", "GiB")}


def announced(predicted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Build the header's lines: what the run is predicted to take, and what that rests on."""
    if not is_shown(predicted):
        return []
    parts = [f"{name} {_with_interval(predicted, key, unit)}" for key, (name, unit) in QUANTITIES.items()]
    return [("predicted", f"{', '.join(parts)} (80 % intervals)"), ("", predicted["basis"])]


def is_shown(predicted: Mapping[str, Any]) -> bool:
    """Whether there is a prediction whose rates were measured or published; on assumed ones it says nothing."""
    return "step_seconds" in predicted and not predicted.get("assumed")


def compare_with_prediction(predicted: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Compare the session's records with the prediction: `0.35 s; predicted 0.32 s (0.2 to 0.9), 9 % too low`.

    Args:
        metrics: records of the steps since the session's start. The first one, which compiles and allocates, counts
            only where it is alone.

    Returns:
        A text for each quantity; {} without a record.
    """
    misses, metrics = {}, list(metrics)
    for key, (name, unit) in QUANTITIES.items():
        values = [record[key] for record in metrics if record.get(key)]
        if not values:
            continue
        measured = max(values) if key == "peak_memory_gib" else statistics.median(values[1:] or values)
        text = f"{measured:.3g} {unit}"
        if key in predicted:
            text += f"; predicted {_with_interval(predicted, key, unit)}, {_miss(predicted, key, measured)}"
        misses[name] = text
    return misses


def of_session(facts: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Compare the records of the last session with the prediction in its run.json; {} where none is shown."""
    return compare_with_prediction(facts["predicted"], metrics) if is_shown(facts.get("predicted") or {}) else {}


def _with_interval(predicted: Mapping[str, Any], key: str, unit: str) -> str:
    low, high = predicted[f"{key}_interval"]
    return f"{predicted[key]:.3g} {unit} ({low:.3g} to {high:.3g})"


def _miss(predicted: Mapping[str, Any], key: str, measured: float) -> str:
    """Say how far the prediction is from the measured value, and whether that is within the interval."""
    low, high = predicted[f"{key}_interval"]
    error = predicted[key] / measured - 1
    place = "" if low <= measured <= high else ", outside the interval"
    # a smaller difference would be shown as 0%
    if not math.isfinite(error) or abs(error) < 0.005:
        return f"as measured{place}"
    return f"{abs(error):.0%} too {'high' if error > 0 else 'low'}{place}"
