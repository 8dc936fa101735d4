"""Watchdog: ends a run if a rank died or failed, or if there was no progress for watchdog.timeout_seconds.

A thread in every process monitors its own progress and the heartbeats of the other ranks (heartbeat.py); liveness.py
draws the conclusions. A responsive main thread gets some time to report its own error. Then the watchdog ends the
process, because the main thread may wait in a collective that other ranks never join. Stack traces go to stderr until
all ranks have started, then to stacks/rank_00000.txt.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from samecurve.errors import HangError, PeerError, SamecurveError
from samecurve.run.beats import Beat, where
from samecurve.run.heartbeat import STALE_BEATS, Heartbeats, exists
from samecurve.run.liveness import Liveness
from samecurve.storage.fault_points import fault_point
from samecurve.storage.file_lock import machine

GRACE_SECONDS = 2.0  # for a responsive main thread to report its own error
REPORT_SECONDS = 15.0  # for another rank's heartbeat to say that it has reported the error
LAST_RESORT_SECONDS = 30.0  # for storage and stderr, see `last_resort`


class HangWatchdog:
    """Context manager that runs the watchdog thread. The training loop reports to it by `phase` and `progress`.

    Args:
        folder: the run directory.
        limit: watchdog.timeout_seconds, 0 for no limit.
        end: called in the watchdog's thread to end the process. Returns only if another thread is ending it already:
            the main thread, successfully or with an error of its own, or the one that handles stop signals.
        interval: seconds between two checks.

    Attributes:
        given_up: frozen ranks. The lowest other rank of their machine ends them.
    """

    def __init__(self, folder: Path, limit: float, end: Callable[[SamecurveError], None], interval: float = 1.0):
        self.rank = int(os.environ.get("RANK", "0"))
        self.step = 0
        self._phase, self._num_phases, self._num_marks = "start", 0, 0
        self._host, self._machine = socket.gethostname(), machine()
        self._limit, self._end = limit, end
        self._interval = min(interval, limit / 8) if limit else interval
        self._marked = self._polled = time.monotonic()
        self.stacks = Stacks(folder / "stacks", self.rank)
        self.given_up: set[int] = set()
        # STALE_BEATS of these take less than the limit, so that a hang can be blamed on frozen ranks
        every = min(5.0, limit / 4) if limit else 5.0
        self.heartbeats = Heartbeats(folder / "heartbeats", self._beat, every, self._interval)
        self._closed = threading.Event()

    def __enter__(self) -> HangWatchdog:
        self.stacks.register()
        if self.rank == 0:
            self.heartbeats.clear()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        self.heartbeats.close()
        self._thread.join(timeout=GRACE_SECONDS)
        self.stacks.close()

    def phase(self, name: str, step: int = 0) -> None:
        """Enter the phase `name`. All ranks make the same calls, the first one after all ranks have started."""
        fault_point(name)
        self._phase, self.step = name, step
        self._num_phases += 1
        self._num_marks = 0
        self._marked = time.monotonic()
        if self._num_phases == 1:
            self.stacks.open()
            self.heartbeats.start()

    def progress(self) -> None:
        """Report progress inside a long phase. All ranks make the same calls, so that a lagging rank can be named."""
        self._num_marks += 1
        self.local_progress()

    def local_progress(self) -> None:
        """Report progress that differs between ranks. May be called from any thread."""
        self._marked = time.monotonic()

    @property
    def where(self) -> str:
        return where(self._phase, self.step)

    def liveness(self) -> Liveness:
        """Snapshot of all ranks as this one sees them now."""
        peers = sorted(self.heartbeats.peers.values(), key=lambda peer: peer.beat.rank)
        now, looked = time.monotonic(), self.heartbeats.looked
        return Liveness(
            self._beat(), peers, self.given_up, looked, now, self._limit, STALE_BEATS * self.heartbeats.every
        )

    def cause(self, after_seconds: float = 0.0) -> PeerError | None:
        """Return the failure or death of another rank, see Liveness.cause."""
        return self.liveness().cause(after_seconds)

    def wait_if_ending(self) -> None:
        """Wait for the watchdog to end the process with its message, if it has given up other ranks; else return."""
        end = time.monotonic() + 3 * COLLECT_SECONDS  # Stacks.collect waits twice, COLLECT_SECONDS at most each
        while self.given_up and time.monotonic() < end:
            time.sleep(0.05)

    def wait_for_report(self) -> tuple[bool, bool]:
        """Wait for a limited time until a rank reports why the run ends; return (this one has to, another one did)."""
        deadline = time.monotonic() + REPORT_SECONDS
        while self.heartbeats.started and time.monotonic() < deadline:
            self.heartbeats.look()
            if self.liveness().is_reported or self.liveness().is_reporter:
                break
            time.sleep(0.1)
        return self.liveness().is_reporter, self.liveness().is_reported

    def _beat(self) -> Beat:
        return Beat(
            rank=self.rank,
            pid=os.getpid(),
            host=self._host,
            machine=self._machine,
            phase=self._phase,
            step=self.step,
            num_phases=self._num_phases,
            num_marks=self._num_marks,
            idle_seconds=round(time.monotonic() - self._marked, 3),
        )

    def _watch(self) -> None:
        while not self._closed.wait(self._interval):
            now = time.monotonic()
            if now - self._polled > max(2.0, 5 * self._interval):  # the whole process was suspended: a laptop, SIGSTOP
                self._marked = now
                self.heartbeats.restart()
            self._polled = now
            self.heartbeats.wide = self.rank == 0 or self.liveness().may_hang_soon
            if self.cause(GRACE_SECONDS):
                self.heartbeats.look()  # the rank may have reported in the meantime that it finished
            error = self.cause(GRACE_SECONDS) or self._hang()
            if error and not self._closed.is_set():
                self._end(error)
                return

    def _hang(self) -> HangError | None:
        if not self.liveness().hangs:
            return None
        timer = last_resort(HangError.exit_code)  # what hangs may be the storage that is written to from here on
        self.heartbeats.wide = True
        self.stacks.dump(f"rank {self.rank} (pid {os.getpid()}) on {self._host}: {self.where}")
        self.heartbeats.write("hanging")
        if self._closed.wait(GRACE_SECONDS):  # the other ranks notice, write their stacks and report their phases
            timer.cancel()
            return None
        self.heartbeats.look()
        liveness = self.liveness()
        # before stacks are collected: a woken rank beats again
        text = liveness.describe_hang(self.stacks.folder.parent)
        # collect the stacks of this machine's ranks; done by the lowest rank of the machine that is not frozen
        frozen = {peer.beat.rank for peer in liveness.frozen}
        self.given_up = frozen  # remembered, because a stopped process that is woken for its stacks beats once more
        local = [peer.beat for peer in liveness.running if self.heartbeats.is_local(peer.beat)]
        if not any(beat.rank < self.rank and beat.rank not in frozen for beat in local):
            self.stacks.collect({beat.rank: beat.pid for beat in local}, frozen)
        limit = f"no progress for {self._limit:g} s (watchdog.timeout_seconds)"
        return HangError(f"{limit}: {text}; the stacks of all ranks are in {self.stacks.folder}")


def last_resort(code: int, report: Callable[[], None] = lambda: None) -> threading.Timer:
    """Start a timer that ends the process after LAST_RESORT_SECONDS, even if storage and stderr both hang.

    Args:
        code: the exit code.
        report: called before the end, in a thread of its own and for GRACE_SECONDS at most.
    """

    def end() -> None:
        last_word = threading.Thread(target=report, daemon=True)
        last_word.start()
        last_word.join(GRACE_SECONDS)
        os._exit(code)

    timer = threading.Timer(LAST_RESORT_SECONDS, end)
    timer.daemon = True
    timer.start()
    return timer


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
        faulthandler.register(signal.SIGVTALRM, file=self._descriptor, all_threads=False, chain=True)
        faulthandler.enable(self._descriptor, all_threads=False)  # a crash in C code tells where it was

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
        # and those that wait for it would go on training and commit checkpoints. A signal to the process is handled by
        # whichever thread wakes up first, while the other threads continue: this one is for the main thread.
        for rank in silent.keys() & frozen:
            pid = silent[rank]
            try:
                ctypes.CDLL(None).tgkill(pid, pid, signal.SIGVTALRM)
            except (AttributeError, OSError):  # not Linux, or glibc before 2.30
                _send(pid, signal.SIGVTALRM)
            _send(pid, signal.SIGCONT)
        _wait_until(lambda: not any(exists(silent[rank]) for rank in silent.keys() & frozen))
        for rank in processes.keys() & frozen:
            _send(processes[rank], signal.SIGKILL)

    def close(self) -> None:
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGVTALRM)
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        faulthandler.enable(self._descriptor, all_threads=False)
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
