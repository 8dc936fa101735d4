"""Faults at the places of the package that call `fault_point`, as the variable SAMECURVE_FAULTS plans them.

    SAMECURVE_FAULTS="save.write@2:1:kill,step@7/0:0:hang"   phase[@occurrence][/restart]:rank:action, ...

phase: a place in the code that calls `fault_point`.
occurrence: counts this process's visits of the phase, from 1 (the default); "*" means every visit.
restart: only processes of torchrun's restart with this number fail; 0 is the first start.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Fault(NamedTuple):
    phase: str
    occurrence: int | None
    rank: int
    action: str
    restart: str = ""


def _raise(code: int) -> Callable[[], None]:
    def action() -> None:
        raise OSError(code, os.strerror(code))

    return action


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _hang() -> None:
    """Simulate a deadlock: the process stays alive and this thread does nothing."""
    while True:
        time.sleep(1)


def _fail() -> None:
    raise RuntimeError("a failure on purpose (SAMECURVE_FAULTS)")


ACTIONS: Mapping[str, Callable[[], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "term": _signal(signal.SIGTERM),
    "hang": _hang,
    "fail": _fail,
    "slow": lambda: time.sleep(3),
    "enospc": _raise(errno.ENOSPC),
    "eio": _raise(errno.EIO),
    "eacces": _raise(errno.EACCES),
}


class Injector:
    """Triggers the faults of this rank.

    Raises ValueError for a plan that cannot be parsed: otherwise a test would inject nothing and pass.
    """

    def __init__(self):
        rank = int(os.environ.get("RANK", "0"))
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        faults = map(parse_fault, filter(None, os.environ["SAMECURVE_FAULTS"].split(",")))
        self._faults = [fault for fault in faults if fault.rank == rank and fault.restart in ("", restart)]
        self._visits: Counter[str] = Counter()

    def visit(self, phase: str) -> None:
        self._visits[phase] += 1
        for fault in self._faults:
            if fault.phase == phase and fault.occurrence in (None, self._visits[phase]):
                ACTIONS[fault.action]()


def parse_fault(text: str) -> Fault:
    place, rank, action = text.strip().split(":")
    place, _, restart = place.partition("/")
    phase, _, occurrence = place.partition("@")
    if action not in ACTIONS:
        raise ValueError(f"{text}: no action {action}; there are {', '.join(ACTIONS)}")
    return Fault(phase, None if occurrence == "*" else int(occurrence or 1), int(rank), action, restart)
