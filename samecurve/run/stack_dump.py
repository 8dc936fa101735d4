"""Where each thread of a process is: output_dir/stacks/rank_00000.txt, when nothing moves or SIGUSR2 asks for it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from samecurve.run.heartbeat import exists

COLLECT_SECONDS = 2.0


class Stacks:
    """This rank's file. Until `open` there is none, and `show` writes to stderr; an empty one does not stay."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self._rank = folder, rank
        self._stream: IO[str] | None = None

    def register(self) -> None:
        """From here on SIGVTALRM ends the process, as it always would, but the main thread's stack is written first:
        also when it stands in C and holds the interpreter's lock. Not the other threads': they run on meanwhile, and
        who reads their frames without the lock crashes at times (one of 500 to 1,500 times with Python 3.11)."""
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGVTALRM, file=self._descriptor, all_threads=False, chain=True)

    def open(self) -> None:
        if self._stream is None:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._stream = open(self._path(self._rank), "w", encoding="utf-8")
                self.register()

    def show(self) -> None:
        """Write the stacks of all threads, of a run that goes on: with the interpreter's lock, so they stand still."""
        with contextlib.suppress(OSError, ValueError):  # it may be closed meanwhile
            faulthandler.dump_traceback(self._descriptor, all_threads=True)

    def dump(self, header: str) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.write(f"{header}\n")
                self._stream.flush()
            self.show()

    def collect(self, processes: Mapping[int, int], frozen: set[int]) -> None:
        """From other ranks' processes of this machine, what they did not write themselves. The frozen ones end here.

        processes: their ids by rank. frozen: ranks. A stopped process has to wake up to write, and its main thread may
        not go on then (on Linux): it and those that wait for it would still train and commit checkpoints.
        """
        silent = {rank: pid for rank, pid in processes.items() if not self._is_written(rank)}
        for rank in silent.keys() - frozen:
            _send(silent[rank], signal.SIGUSR2)
        _wait_until(lambda: all(map(self._is_written, silent.keys() - frozen)))
        for rank in silent.keys() & frozen:
            _send_to_main_thread(silent[rank], signal.SIGVTALRM)
            _send(silent[rank], signal.SIGCONT)
        _wait_until(lambda: not any(exists(silent[rank]) for rank in silent.keys() & frozen))
        for rank in processes.keys() & frozen:
            _send(processes[rank], signal.SIGKILL)

    def close(self) -> None:
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGVTALRM)
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        stream.close()
        with contextlib.suppress(OSError):
            if not self._is_written(self._rank):
                self._path(self._rank).unlink()
            self.folder.rmdir()  # by the last rank, and only when it is empty

    @property
    def _descriptor(self) -> int:
        stream = self._stream
        return 2 if stream is None else stream.fileno()

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank_{rank:05d}.txt"

    def _is_written(self, rank: int) -> bool:
        with contextlib.suppress(OSError):
            return self._path(rank).stat().st_size > 0
        return False


def _wait_until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + COLLECT_SECONDS
    while not met() and time.monotonic() < deadline:
        time.sleep(0.05)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _send_to_main_thread(pid: int, number: int) -> None:
    """A stopped process's own signals are taken by whichever thread wakes up first, while the others go on."""
    try:
        ctypes.CDLL(None).tgkill(pid, pid, number)
    except (AttributeError, OSError):  # not Linux, or glibc before 2.30
        _send(pid, number)
