"""Processes that work for the one that trains, and how many could at once."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # Linux's prctl: the signal for a process whose parent is gone


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(num_processes: int) -> int:
    """Threads of each, where so many share them; at least one."""
    return max(1, num_cores() // num_processes)


def init_worker(*_: object) -> None:
    """A worker's first act. It lives as long as its parent and answers to nobody else.

    What the terminal or a launcher tells all processes is for the one that trains: a forked worker has its handlers,
    which would write the run's status. It also has its lock and its connections, by which other processes see whether
    that one is alive; PyTorch's workers look for their parent every 5 seconds only, and those of a pool never.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.enable()  # the parent's is on a schedule (gc_schedule.py), which nobody keeps here
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
