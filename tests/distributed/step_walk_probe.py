"""Run under a launcher with train.py's arguments: a training in which the functions of one step are noted.

Prints one JSON line on rank 0: {place: {file: lines}} of samecurve/ and train.py, files in the order of their first
call. A place is `rows` (the loader's thread, and what the loop does to get a step's micro-batches), `step` (from the
learning rate to the StepResult) or `after`. `lines` counts those of the functions that ran.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import train
from samecurve.data.batches import StepBatches
from samecurve.optim.schedule import learning_rate
from samecurve.run import lifecycle

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, LOOP = f"{ROOT / 'samecurve'}/", str(ROOT / "train.py")
LOADER = "step-batches"  # the thread's name
STEP = 3  # of 4, so neither the first, the last nor one that evaluates or saves


class Walk:
    """A profile function that notes the calls of the loop's thread during STEP, and all calls of the loader's."""

    def __init__(self, step: Callable[..., Any]):
        self.found: dict[str, dict[str, set[int]]] = {"rows": {}, "step": {}, "after": {}}
        self._end = step.__code__
        self._place, self._steps = "after", 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) and code.co_filename != LOOP:
            return
        if threading.current_thread().name.startswith(LOADER):
            self.note(code, "rows")
        elif event == "call":
            if code is StepBatches.__iter__.__code__:
                self._place, self._steps = "rows", self._steps + 1
            elif code is learning_rate.__code__:
                self._place = "step"
            if self._steps == STEP:
                self.note(code, self._place)
        elif event == "return" and code in (StepBatches.__iter__.__code__, self._end):
            self._place = "after"

    def note(self, code: CodeType, place: str) -> None:
        lines = self.found[place].setdefault(str(Path(code.co_filename).relative_to(ROOT)), set())
        lines.update(range(code.co_firstlineno, 1 + max(line for *_, line in code.co_lines() if line)))


def watched(loop: Callable[[Any], None]) -> Callable[[Any], None]:
    def train_loop(session: Any) -> None:
        walk = Walk(type(session.engine).step)
        walk.note(loop.__code__, "step")
        threading.setprofile(walk)
        sys.setprofile(walk)
        loop(session)
        sys.setprofile(None)
        threading.setprofile(None)
        counts = {place: {file: len(lines) for file, lines in files.items()} for place, files in walk.found.items()}
        session.context.accelerator.print("WALK " + json.dumps(counts))

    return train_loop


if __name__ == "__main__":
    train.train = watched(train.train)
    lifecycle.end_with(train.main)
