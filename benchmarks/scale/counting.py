"""Ranks that are forked here, and the bytes and calls that Linux counts for each of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

SETTLE_SECONDS = 0.3  # gloo's own thread may send a little later


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


class Counted:
    """Counts what this process does in its body, divided by `times`, without the barrier that comes before.

    Attributes:
        barrier: what an empty body is counted with; set by the first use.
    """

    barrier: dict[str, int] | None = None

    def __init__(self, found: dict, name: str, times: int = 1):
        self._found, self._name, self._times = found, name, times

    def __enter__(self) -> None:
        from torch import distributed as dist

        dist.barrier()
        time.sleep(SETTLE_SECONDS)
        self._before = counters()
        dist.barrier()  # else a rank might begin before another one, whose store it asks, has read its counters
        self._began = time.perf_counter()

    def __exit__(self, *_) -> None:
        seconds = time.perf_counter() - self._began
        time.sleep(SETTLE_SECONDS)
        change = {key: value - self._before[key] for key, value in counters().items()}
        empty = Counted.barrier = Counted.barrier or change
        counted = {key: (value - empty[key]) / self._times for key, value in change.items()}
        self._found[self._name] = counted | {"ms": 1000 * seconds / self._times}


def counters() -> dict[str, int]:
    """Bytes written to sockets and files, bytes read from files, calls that write; of this process since its start."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = {key: int(value) for key, value in lines}
    return {"sent": found["wchar"], "read": found["rchar"], "writes": found["syscw"]}
