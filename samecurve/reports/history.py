"""What reports need of a run's metrics.jsonl, gathered in one pass and in memory that does not grow with the run.

Above NUM_BUCKETS steps, a curve keeps the lowest and the highest value of each of NUM_BUCKETS equal parts of the run,
so that a spike of one step stays visible. Sums, counts, first, last, lowest and highest values are those of all steps;
medians are those of evenly spaced steps (see EvenlySpaced) in a run of more steps than that keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from samecurve.run.run_directory import iterate_metrics, last_step
from samecurve.storage.jsonl import EvenlySpaced

NUM_BUCKETS = 1200  # four for each that a plot draws
KEYS = {
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "input_tokens",
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "hfu",
}
KEYS |= {"peak_memory_gib", "data_wait_fraction", "save_stall_seconds", "distance", "with_zero"}  # and those of eval_
SMOOTHED = ("loss", "grad_norm", "tokens_per_second")
SMOOTHED_STEPS, SMOOTHED_SHARE = 10, 50  # 10 steps as in the meter; for a long run a fiftieth of its steps

_LARGEST_INTEGER = 2**63

Point = tuple[int, "float | None"]


class History:
    """Summary of the records of a run.

    Args:
        records: one per step, sorted by step; None for a damaged line.
        num_steps: how many there are, about: it divides the run into buckets.
        start_step: the step after which the last session began.

    Attributes:
        num_steps, num_damaged: number of records, and of damaged lines, which are left out.
        last: the last record, {} without one.
        records: records of evenly spaced steps, of the last session, and those with an evaluation.
        curves: (step, value) by key, thinned. None: the steps of a bucket have the key, but no value.
        smoothed: for each key of SMOOTHED the bias-corrected exponential moving average over about `window` steps.
        totals: sum of all values by key.
        ends: first and last value by key. A key without a value is in none of the last two.
    """

    def __init__(self, records: Iterable[dict | None], num_steps: int, start_step: int = 0):
        self.num_steps = self.num_damaged = 0
        self.last: dict = {}
        self.records, self.session, self.evaluations = EvenlySpaced(), EvenlySpaced(), EvenlySpaced()
        self.window = max(SMOOTHED_STEPS, num_steps // SMOOTHED_SHARE)
        self.curves: dict[str, list[Point]] = {}
        self.smoothed: dict[str, list[Point]] = {}
        self.totals: dict[str, float] = {}
        self.ends: dict[str, tuple[float, float]] = {}
        self._averages: dict[str, tuple[float, float]] = dict.fromkeys(SMOOTHED, (0.0, 0.0))  # with their weights
        width, bucket = max(1, math.ceil(num_steps / NUM_BUCKETS)), []
        for record in records:
            if record is None:
                self.num_damaged += 1
                continue
            self.records.add(record)
            if record["step"] > start_step:
                self.session.add(record)
            if "eval_loss" in record:
                self.evaluations.add(record)
            bucket.append(record)
            if len(bucket) == width:
                self._add(bucket)
                bucket = []
        if bucket:
            self._add(bucket)

    @classmethod
    def read(cls, directory: Path, start_step: int = 0, up_to: float = math.inf) -> History:
        """Read a run directory's metrics.jsonl up to the step `up_to`. Raises StorageError."""
        first = next((record["step"] for record in iterate_metrics(directory) if record), 0)
        records = (record for record in iterate_metrics(directory) if record is None or record["step"] <= up_to)
        return cls(records, int(min(last_step(directory), up_to)) - first + 1, start_step)

    def lowest(self, name: str) -> tuple[float, int] | None:
        """Return the lowest value of a key and its step."""
        return min(((value, step) for step, value in self.curves.get(name, ()) if value is not None), default=None)

    def values(self, name: str) -> list[float]:
        """List the values of a key at evenly spaced steps."""
        return [record[name] for record in self.records if record.get(name) is not None]

    def _add(self, bucket: Sequence[dict]) -> None:
        self.num_steps += len(bucket)
        self.last = bucket[-1]
        steps = [record["step"] for record in bucket]
        for name in dict.fromkeys(chain.from_iterable(bucket)):
            if name not in KEYS and not name.startswith("eval_"):
                continue
            column: list[Any] = [record.get(name) for record in bucket]
            here, values = steps, column
            if None in column:
                here = [step for step, value in zip(steps, column, strict=True) if value is not None]
                values = [value for value in column if value is not None]
            if values and not -_LARGEST_INTEGER < min(values) <= max(values) < _LARGEST_INTEGER:
                values = [float(value) for value in values]  # sums of longer integers may fit no float
            if not values:
                self.curves.setdefault(name, []).append((steps[0], None))
            else:
                self.curves.setdefault(name, []).extend(_extremes(here, values))
                self.totals[name] = self.totals.get(name, 0) + sum(values)
                self.ends[name] = (self.ends[name][0] if name in self.ends else values[0], values[-1])
            if name in SMOOTHED:
                (average, weight), new = self._averages[name], 1 / self.window
                means = []
                for value in values:
                    average += new * (value - average)
                    weight += new * (1 - weight)
                    means.append(average / weight)
                self._averages[name] = average, weight
                points = _extremes(here, means) if means else [(steps[0], None)]
                self.smoothed.setdefault(name, []).extend(points)


def _extremes(steps: Sequence[int], values: Sequence[float]) -> list[Point]:
    """Return the points of the lowest and the highest value, in the order of their steps."""
    low, high = min(values), max(values)
    places = sorted({values.index(low), values.index(high)})
    return [(steps[place], values[place]) for place in places]
