"""Watchdog: ends a run if a rank died or failed, or if there was no progress for watchdog.timeout_seconds.

A thread in every process monitors its own progress and the heartbeats of the other ranks (heartbeat.py). A responsive
main thread gets some time to report its own error. Then the watchdog ends the process, because the main thread may wait
in a collective that other ranks never join. Stack traces go to stderr until all ranks have started, then to
stacks/rank_00000.txt.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from samecurve.distributed.host import machine
from samecurve.errors import HangError, PeerError, SamecurveError
from samecurve.run.heartbeat import Beat, Heartbeats, Peer, where
from samecurve.run.stack_dump import COLLECT_SECONDS, Stacks
from samecurve.storage.fault_injection import fault_point

# Phases without a time limit: their duration depends on the size of model and data.
UNLIMITED = ("start", "build")
GRACE_SECONDS = 2.0
LAST_RESORT_SECONDS = 30.0


class Watchdog:
    """Context manager that runs the watchdog thread. The training loop calls `phase` and `progress` at no cost.

    Args:
        folder: the run directory.
        limit: watchdog.timeout_seconds, 0 for no limit.
        end: called in the watchdog's thread to end the process. Returns only if the main thread is already reporting an
            error of its own.
        interval: seconds between two checks.
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
        self._given_up: set[int] = set()
        every = min(5.0, limit / 4) if limit else 5.0
        self.heartbeats = Heartbeats(folder / "heartbeats", self._beat, every, self._interval)
        self._stale = 3 * every
        self._closed = threading.Event()

    def __enter__(self) -> Watchdog:
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

    def cause(self, after_seconds: float = 0.0) -> PeerError | None:
        """Return the failure or death of another rank seen at least `after_seconds` ago; None if there is none.

        Of several, the most likely cause is returned. Ranks that this watchdog has given up and is ending do not count,
        see `wait_if_ending`.
        """
        found = [peer for peer in self._peers() if peer.beat.rank not in self._given_up]
        latest = time.monotonic() - after_seconds
        ended = [peer for peer in found if peer.ended is not None and peer.ended <= latest]
        if not ended:
            return None
        # A reported failure comes first: it describes an error of its own or the effect of another rank's death.
        first = min(ended, key=lambda peer: (peer.died, peer.beat.time)).beat
        if first.state == "failed":
            return PeerError(first.reason, first.exit_code)
        return PeerError(
            f"{first.name} died, while rank {self.rank} was in {self.where}; it left no message, so look for its own "
            "output and for the system's (dmesg: out of memory?)"
        )

    def wait_if_ending(self) -> None:
        """Wait for the watchdog to end the process with its message, if it has given up other ranks; else return."""
        end = time.monotonic() + 3 * COLLECT_SECONDS
        while self._given_up and time.monotonic() < end:
            time.sleep(0.05)

    def is_reporter(self) -> bool:
        """Whether this is the lowest rank that can still report why the run ends."""
        if self.rank == 0 or not self._num_phases:
            return self.rank == 0
        reported = any(peer.beat.rank == 0 and peer.beat.state in ("failed", "finished") for peer in self._peers())
        return not reported and all(peer.beat.rank > self.rank for peer in self._live())

    def replaces_rank_0(self) -> bool:
        """Whether this rank must write status.json: it is the reporter, and rank 0 had started but died or is stuck."""
        return self.rank > 0 and 0 in self.heartbeats.peers and self.is_reporter()

    def _peers(self) -> list[Peer]:
        return sorted(self.heartbeats.peers.values(), key=lambda peer: peer.beat.rank)

    def _live(self) -> list[Peer]:
        fresh = [peer for peer in self._running() if time.monotonic() - peer.changed <= self._stale]
        return [peer for peer in fresh if peer.beat.rank not in self._given_up]

    def _running(self) -> list[Peer]:
        return [peer for peer in self._peers() if peer.ended is None and peer.runs]

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
            self.heartbeats.wide = self.rank == 0 or self._may_be_stuck_soon(now)
            if self.cause(GRACE_SECONDS):
                self.heartbeats.look()  # the rank may have reported in the meantime that it finished
            error = self.cause(GRACE_SECONDS) or self._hang()
            if error and not self._closed.is_set():
                self._end(error)
                return

    def _hang(self) -> HangError | None:
        if not self._limit or not (self._stuck() or self._another_hangs()):
            return None
        timer = last_resort(HangError.exit_code)
        self.heartbeats.wide = True
        self.stacks.dump(f"rank {self.rank} (pid {os.getpid()}) on {self._host}: {self.where}")
        self.heartbeats.write("hanging")
        if self._closed.wait(GRACE_SECONDS):  # the other ranks notice, write their stacks and report their phases
            timer.cancel()
            return None
        self.heartbeats.look()
        frozen = self._frozen()
        text = self._judge(frozen)
        self._collect({peer.beat.rank for peer in frozen})
        limit = f"no progress for {self._limit:g} s (watchdog.timeout_seconds)"
        return HangError(f"{limit}: {text}; the stacks of all ranks are in {self.stacks.folder}")

    def _stuck(self) -> bool:
        """Whether this rank is stuck. In phases without a limit, only another rank's missing heartbeat counts."""
        now = time.monotonic()
        if self._phase in UNLIMITED:
            return self._can_judge() and any(now - peer.changed > self._limit for peer in self._running())
        return now - self._marked > self._limit and not self._another_gets_on()

    def _may_be_stuck_soon(self, now: float) -> bool:
        """Whether the limit is near, so that the progress of ranks on other hosts must be known."""
        soon = self._limit - 3 * self.heartbeats.every
        return bool(self._limit) and self._phase not in UNLIMITED and now - self._marked > soon

    def _another_gets_on(self) -> bool:
        """Whether this rank may just be waiting for a slow one, for example at a large file.

        In a blocked collective no rank makes progress.
        """
        return any(peer.beat.idle_seconds < self._limit / 2 for peer in self._live())

    def _another_hangs(self) -> bool:
        return any(peer.beat.state == "hanging" for peer in self._live())

    def _frozen(self) -> list[Peer]:
        if not self._can_judge():
            return []
        return [peer for peer in self._running() if time.monotonic() - peer.changed > self._stale]

    def _can_judge(self) -> bool:
        return time.monotonic() - self.heartbeats.looked <= self._stale

    def _judge(self, frozen: Sequence[Peer]) -> str:
        """Describe the cause of the hang, as far as this rank can see it."""
        if not self._can_judge():
            return (
                f"rank {self.rank} is in {self.where}, and the storage of {self.stacks.folder.parent} does not answer"
            )
        if frozen:
            return ", ".join(
                f"{peer.beat.name} shows no sign of life (stopped, or its host is dead), last seen in {peer.beat.where}"
                for peer in frozen
            )
        beats = sorted([self._beat(), *(peer.beat for peer in self._live())], key=lambda beat: beat.rank)
        least = min((beat.num_phases, beat.num_marks) for beat in beats)
        behind = [beat for beat in beats if (beat.num_phases, beat.num_marks) == least]
        ahead = max(beats, key=lambda beat: (beat.num_phases, beat.num_marks))
        if len(behind) < len(beats):
            names = ", ".join(f"{beat.name} is in {beat.where} for {beat.idle_seconds:.0f} s" for beat in behind)
            return f"{names}, while rank {ahead.rank} is in {ahead.where}"
        who = f"rank {self.rank} is" if len(beats) == 1 else f"all {len(beats)} ranks that can be seen are"
        return f"{who} in {self.where}"

    def _collect(self, frozen: set[int]) -> None:
        """Collect the stacks of this machine's ranks; done by the lowest rank of the machine that is not frozen."""
        self._given_up = frozen  # remembered, because a stopped process that is woken for its stacks beats once more
        local = [peer for peer in self._running() if self.heartbeats.is_local(peer.beat)]
        if not any(peer.beat.rank < self.rank and peer.beat.rank not in frozen for peer in local):
            self.stacks.collect({peer.beat.rank: peer.beat.pid for peer in local}, frozen)


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
