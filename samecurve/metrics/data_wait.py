"""Warning about slow data loading, printed once and with advice."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samecurve.config.schema import Data

WINDOW_STEPS = 50
FEWEST_STEPS = 20  # a start waits for workers that begin; too few steps would give that wait too much weight
THRESHOLD = 0.05


class WaitAdvice:
    """Monitors the share of time that rank 0 spent waiting for data, over the last WINDOW_STEPS steps together."""

    def __init__(self, data: Data):
        self._data = data
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)  # (seconds of waiting, seconds of step)
        self._first, self._reported = True, False

    def after(self, record: dict) -> str:
        """Return the advice when THRESHOLD is first exceeded, else "". record: the step's line of metrics.jsonl."""
        if self._reported or self._first:
            self._first = False
            return ""
        seconds = record["step_seconds"]
        self._steps.append((record["data_wait_fraction"] * seconds, seconds))
        waited, all_seconds = map(sum, zip(*self._steps, strict=True))
        if len(self._steps) < FEWEST_STEPS or waited <= THRESHOLD * all_seconds:
            return ""
        self._reported = True
        share = f"{waited / all_seconds:.0%} of the time of the last {len(self._steps)} steps"
        return f"waiting for data took {share}: {self._fix()}"

    def _fix(self) -> str:
        if self._data.streaming:
            return (
                "the stream is read and tokenised too slowly; data.streaming=false tokenises the data before training"
            )
        workers = self._data.num_workers
        return (
            f"data.num_workers is {workers}; try {max(1, 2 * workers)}, or measure how many are enough: "
            "python -m samecurve bench dataloader RECIPE"
        )
