"""CPU worker processes of a training process, and the cores that they may use."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # option of Linux's prctl: the signal that a process gets when its parent ends


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(num_processes: int) -> int:
    """Number of cores per process if `num_processes` share this process's cores; at least one."""
    return max(1, num_cores() // num_processes)


def init_worker(*_: object) -> None:
    """Set up signals and garbage collection of a worker process, and end it when its parent ends (on Linux)."""
    # Signals sent to all processes by the terminal or a launcher are meant for the training process. A forked worker
    # inherits that process's handlers, which would write the run's status.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.enable()  # the parent collects on a schedule (gc_schedule.py), which does not run in workers
    # A worker also inherits the lock and connections by which other processes see whether the parent is alive.
    # PyTorch's data loader workers check for their parent only every 5 seconds, those of a pool never.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
