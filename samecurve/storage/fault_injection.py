"""Failures on purpose, for tests/faults. Without the variable SAMECURVE_FAULTS nothing happens here.

    SAMECURVE_FAULTS="save.write@2:1:kill,step@7/0:0:hang"   phase[@occurrence][/restart]:rank:action, ...

A phase is a place in the code that calls `fault_point`; `occurrence` counts this process's visits from 1 (default:
1) and "*" means every visit. With `restart`, only the processes that torchrun started the so-manieth time, from 0,
fail.
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
    """What a deadlock looks like from outside: the process lives, this thread does nothing."""
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
}


class Injector:
    """plan: SAMECURVE_FAULTS' text. Raises ValueError for text that it cannot read: a test that injects nothing."""

    def __init__(self, plan: str, rank: int, restart: str = "0"):
        faults = map(parse_fault, filter(None, plan.split(",")))
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


_injector: Injector | None = None


def fault_point(phase: str) -> None:
    """Fail here, if SAMECURVE_FAULTS says so for this process."""
    global _injector
    if "SAMECURVE_FAULTS" not in os.environ:
        return
    if _injector is None:
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _injector = Injector(os.environ["SAMECURVE_FAULTS"], int(os.environ.get("RANK", "0")), restart)
    _injector.visit(phase)
