"""DeepSpeed's own log of collectives, which a strategy's JSON turns on (`comms_logger`).

On a GPU it waits for the device at each one, so its times are those of collectives that nothing is computed beside, and
what else is recorded meanwhile is slower for it. On a CPU a collective that nobody waits for yet is only handed over.
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

    everything = sorted(comm.comms_logger.get_raw_data().items())
    return [each for name, found in everything for each in _by_size(name, found, bool(comm.timers(name).event_timers))]


def _by_size(name: str, found: dict[int, list], adds_up: bool) -> Iterator[Logged]:
    """found: for each size what DeepSpeed noted, calls and their milliseconds first.

    adds_up: whether that is what all calls of that name took until then, not what the one took. So it is in DeepSpeed
    0.19.8, whose `timed_op` never resets the name's timer; in order they are apart by what each took.
    """
    seconds: dict[int, float] = defaultdict(float)
    before = 0.0
    for ms, size in sorted((ms, size) for size, (_, noted, *_) in found.items() for ms in noted):
        seconds[size] += (ms - before) / 1000
        before = ms if adds_up else 0.0
    for size in sorted(found):
        yield Logged(name, size, found[size][0], seconds[size])
