"""DeepSpeed's own log of collectives, which a strategy's JSON turns on (`comms_logger`).

It waits for the device at each one, so its times are those of collectives that nothing is computed beside; what else is
recorded meanwhile is slower for it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Logged:
    """Calls of one name and size on this rank, in the order of both. num_bytes: of one call."""

    name: str
    num_bytes: int
    calls: int
    seconds: float


def begin() -> None:
    """What was logged before is no longer of interest."""
    if "deepspeed" in sys.modules:
        from deepspeed.comm import comm

        comm.comms_logger.reset_data()
        for timer in comm.timers.get_timers().values():
            timer.reset()


def logged() -> list[Logged]:
    """Since `begin`. Empty where the log is off."""
    if "deepspeed" not in sys.modules:
        return []
    from deepspeed.comm import comm

    return [each for name, found in sorted(comm.comms_logger.get_raw_data().items()) for each in _by_size(name, found)]


def _by_size(name: str, found: dict[int, list]) -> Iterator[Logged]:
    """found: for each size what DeepSpeed noted, calls and their milliseconds first.

    DeepSpeed 0.19.8 notes what all calls of that name took until then, not what the one took (`timed_op` never resets
    the name's timer), so in order they are apart by what each took.
    """
    seconds: dict[int, float] = defaultdict(float)
    before = 0.0
    for until, size in sorted((ms, size) for size, (_, until_then, *_) in found.items() for ms in until_then):
        seconds[size] += (until - before) / 1000
        before = until
    for size in sorted(found):
        yield Logged(name, size, found[size][0], seconds[size])
