"""Stack traces of all threads of a rank, written to output_dir/stacks/rank_00000.txt after a hang or on SIGUSR2."""

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
    """Stack trace file of this rank. Before `open`, `show` writes to stderr; an empty file is removed by `close`."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self._rank = folder, rank
        self._stream: IO[str] | None = None

    def register(self) -> None:
        """Make SIGVTALRM write the main thread's stack before it ends the process, as it does by default.

        This works even while the main thread runs C code and holds the GIL. The other threads are left out: they keep
        running, and reading their frames without the GIL sometimes crashes (once in 500 to 1,500 times, Python 3.11).
        """
        if hasattr(faulthandler, "register"):  # not on Windows
            faulthandler.register(signal.SIGVTALRM, file=self._descriptor, all_threads=False, chain=True)

    def open(self) -> None:
        if self._stream is None:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._stream = open(self._path(self._rank), "w", encoding="utf-8")
                self.register()  # again: faulthandler keeps a descriptor, so far that of stderr

    def show(self) -> None:
        """Write the stacks of all threads; the run continues. Holding the GIL keeps the threads still meanwhile."""
        with contextlib.suppress(OSError, ValueError):  # another thread may close the file meanwhile
            faulthandler.dump_traceback(self._descriptor, all_threads=True)

    def dump(self, header: str) -> None:
        """Write a header and the stacks of all threads to the file. Before `open` it does nothing."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.write(f"{header}\n")
                self._stream.flush()
            self.show()

    def collect(self, processes: Mapping[int, int], frozen: set[int]) -> None:
        """Make other ranks of this machine write the stacks that they have not yet written; kill the frozen ones.

        Args:
            processes: process ids by rank.
            frozen: ranks whose processes are stopped.
        """
        silent = {rank: pid for rank, pid in processes.items() if not self._is_written(rank)}
        for rank in silent.keys() - frozen:
            _send(silent[rank], signal.SIGUSR2)
        _wait_until(lambda: all(map(self._is_written, silent.keys() - frozen)))
        # A stopped process must wake up to write its stack, but its main thread must not continue (on Linux): this rank
        # and those that wait for it would go on training and commit checkpoints.
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
            self.folder.rmdir()  # succeeds on the last rank, and only if the folder is empty

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
    """Send a signal to the main thread of a stopped process.

    A signal to the process is handled by whichever thread wakes up first, while the other threads continue.
    """
    try:
        ctypes.CDLL(None).tgkill(pid, pid, number)
    except (AttributeError, OSError):  # not Linux, or glibc before 2.30
        _send(pid, number)
