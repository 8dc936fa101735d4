"""Python's garbage collector at the same steps on all ranks, instead of whenever the counters of each say so.

A full collection looks at every object of every imported library: 170 ms after importing torch and transformers, 280 ms
with torch.compile (2 cores, CPython 3.11). Left alone it comes seldom, but at another step on each rank, and the others
wait for that rank in their next collective. What is there after the first step is of use until the end, so it is looked
at once and never again (gc.freeze); each collection after that took 2 ms on two ranks of a small model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence


class GarbageCollection:
    """As a context manager: Python collects nothing by itself in here, and `after` does at the end of some steps.

    Args:
        first: the number of the first step. What it leaves is collected: it imports and compiles what the start did
            not.
        every: memory.garbage_collection_steps; 0 leaves it all to Python.
        also_every: periods of what makes all ranks stand still anyway (evaluation, checkpoint); 0: never.
        restart_clock: called after the first collection, the long one, which is no step's time.
    """

    def __init__(self, first: int, every: int, also_every: Sequence[int], restart_clock: Callable[[], None]):
        self._first, self._restart_clock = first, restart_clock
        self._periods = [period for period in (every, *also_every) if period] if every else []

    def __enter__(self) -> GarbageCollection:
        if self._periods:
            gc.disable()
        return self

    def __exit__(self, *_) -> None:
        if self._periods:
            gc.unfreeze()
            gc.enable()

    def after(self, step: int) -> None:
        if self._periods and step == self._first:
            gc.collect()
            gc.freeze()
            self._restart_clock()
        elif any(step % period == 0 for period in self._periods):
            gc.collect()
