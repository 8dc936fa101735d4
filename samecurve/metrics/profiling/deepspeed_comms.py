"""DeepSpeed's own log of collectives, enabled by a strategy's JSON (`comms_logger`).

On a GPU the log waits for the device at each collective. Its times are thus those of collectives without overlapping
computation, and everything else recorded meanwhile becomes slower. On a CPU, the time of an asynchronous collective is
only that of its launch.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class Logged:
    """Calls of one collective with one size on this rank. num_bytes: of one call. seconds: of all calls."""

    name: str
    num_bytes: int
    calls: int
    seconds: float


def begin() -> None:
    """Clear DeepSpeed's log."""
    if "deepspeed" in sys.modules:
        from deepspeed.comm import comm

        comm.comms_logger.reset_data()
        # reset_data leaves the timers, which add up over all calls (see `_by_size`)
        for timer in comm.timers.get_timers().values():
            timer.reset()


def logged() -> list[Logged]:
    """Return the calls since `begin`, sorted by name and size; empty if the log is off."""
    if "deepspeed" not in sys.modules:
        return []
    from deepspeed.comm import comm

    everything = sorted(comm.comms_logger.get_raw_data().items())
    of_names = (_by_size(name, sizes, bool(comm.timers(name).event_timers)) for name, sizes in everything)
    return list(chain.from_iterable(of_names))


def _by_size(name: str, entries: dict[int, list], adds_up: bool) -> Iterator[Logged]:
    """Convert DeepSpeed's entries of one collective.

    Args:
        entries: by size, DeepSpeed's entry: number of calls, their milliseconds, ...
        adds_up: whether the milliseconds are cumulative over all calls of the name. In DeepSpeed 0.19.8 they are,
            because `timed_op` never resets the name's timer. Sorted, consecutive values differ by one call's time.
    """
    seconds: dict[int, float] = defaultdict(float)
    before = 0.0
    for ms, size in sorted((ms, size) for size, (_, noted, *_) in entries.items() for ms in noted):
        seconds[size] += (ms - before) / 1000
        before = ms if adds_up else 0.0
    for size in sorted(entries):
        yield Logged(name, size, entries[size][0], seconds[size])
