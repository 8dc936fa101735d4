"""Heartbeat files: ranks observe each other without a collective.

Each rank rewrites a small file every few seconds:

    output_dir/heartbeats/rank_00001.json

Rank 0 removes an earlier session's files before any rank of this session writes one: heartbeats begin only after all
ranks have started (see `Heartbeats.start`). If hosts do not share the directory, only ranks of the same host are
visible, and files of an earlier session on the same machine are recognized by their time.

Freshness compares no clocks of different hosts: a heartbeat is fresh as long as it keeps changing. Ranks of one machine
also check whether each other's processes exist.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

LAST_WORD_SECONDS = 20.0

State = Literal["running", "hanging", "finished", "failed"]


@dataclass(frozen=True)
class Beat:
    """Content of one heartbeat file.

    Attributes:
        machine: equal for processes whose process ids can be compared, see `host.machine`.
        num_phases: number of calls of `Watchdog.phase`.
        num_marks: number of calls of `Watchdog.progress` since the last call of `phase`.
        idle_seconds: time since the last call of either.
        time: when this heartbeat was written, in seconds since 1970.
        reason, exit_code: describe a failure.
    """

    rank: int
    pid: int
    host: str
    machine: str
    phase: str
    step: int
    num_phases: int
    num_marks: int
    idle_seconds: float
    time: float = 0.0
    state: State = "running"
    reason: str = ""
    exit_code: int = 0

    @property
    def where(self) -> str:
        return where(self.phase, self.step)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


@dataclass
class Peer:
    """Another rank as seen from this one. Times are those of time.monotonic.

    Attributes:
        beat: its latest heartbeat.
        changed: when its heartbeat last changed.
        ended: when the rank was first seen failed or gone; None while it is alive.
    """

    beat: Beat
    changed: float
    ended: float | None = None

    @property
    def runs(self) -> bool:
        """Whether the rank is running according to its own heartbeat."""
        return self.beat.state in ("running", "hanging")

    @property
    def died(self) -> bool:
        """Whether its process is gone without having reported a failure."""
        return self.ended is not None and self.runs


class Heartbeats:
    """Writer of this rank's heartbeat file and reader of the other ranks' files.

    Nothing is written before `start`: until all ranks have started, the directory may belong to another run.

    Args:
        folder: output_dir/heartbeats.
        describe: makes the heartbeat to write; its time and state are filled in here.
        every: seconds between two heartbeats.
        interval: seconds between two checks of the processes on this machine.

    Attributes:
        peers: the other ranks, by rank.
        looked: when their files were last read (time.monotonic).
        wide: whether all files are read each time, see `look`.
    """

    def __init__(self, folder: Path, describe: Callable[[], Beat], every: float, interval: float):
        self.folder, self.every = folder, every
        self.peers: dict[int, Peer] = {}
        self.looked = time.monotonic()
        self.started = self.wide = False
        self._describe, self._interval = describe, interval
        self._since = time.time()
        self._own = describe()
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def clear(self) -> None:
        """Remove an earlier session's files. For rank 0, when it owns the run directory but before ranks meet."""
        self._remove("*rank_*")

    def _remove(self, pattern: str) -> None:
        with contextlib.suppress(OSError):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def start(self) -> None:
        """Start the heartbeat thread, once all ranks have started."""
        self.started = True
        if self._own.rank == 0:
            self._remove("refused_*")
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def write(self, state: State | None = None, reason: str = "", exit_code: int = 0) -> None:
        """Write a heartbeat, after waiting for a write in progress (which can take long on slow storage).

        Storage errors are ignored: the next heartbeat carries the same information.

        Args:
            state: the state from now on; None keeps the current one.
            reason, exit_code: describe a failure.
        """
        if state is not None:
            self._own = replace(self._own, state=state, reason=reason, exit_code=exit_code)
        patience = LAST_WORD_SECONDS if state in ("finished", "failed") else self.every
        if not self.started or not self._lock.acquire(timeout=patience):
            return
        try:
            final = {name: getattr(self._own, name) for name in ("state", "reason", "exit_code")}
            beat = replace(self._describe(), time=time.time(), **final)
            path = self._path(beat.rank)
            partial = path.with_name(f".{path.name}.partial")
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                partial.write_text(json.dumps(asdict(beat)), encoding="utf-8")
                os.replace(partial, path)
        finally:
            self._lock.release()

    def look(self, at_all: bool = True) -> None:
        """Read the other ranks' files and check their processes.

        Args:
            at_all: False reads only the files of rank 0 and of this machine's ranks. In a large run, every rank reading
                every file each few seconds would overload a shared file system. Rank 0 reads all of them, and its own
                file reports what it saw.
        """
        with contextlib.suppress(OSError):
            if at_all:
                paths = list(self.folder.glob("rank_*.json"))
            else:
                near = self._near()
                paths = [self._path(rank) for rank in near]
                # a peer that is no longer read would look frozen; a failure stays known
                unread = [rank for rank, peer in list(self.peers.items()) if rank not in near and peer.runs]
                for rank in unread:
                    self.peers.pop(rank, None)
            for path in paths:
                self._take(_read(path))
            self.looked = time.monotonic()
        self._look_for_processes()

    def is_local(self, beat: Beat) -> bool:
        return beat.machine == self._own.machine

    def restart(self) -> None:
        """Restart the freshness measurement: this process was suspended, and perhaps the others too."""
        self.looked = time.monotonic()
        for peer in list(self.peers.values()):
            peer.changed = self.looked

    def _beat(self) -> None:
        due = 0.0
        while not self._stop.is_set():
            if time.monotonic() >= due:
                due = time.monotonic() + self.every
                self.write()
                self.look(at_all=self.wide)
            else:
                self._look_for_processes()
            self._stop.wait(self._interval)

    def _path(self, rank: int) -> Path:
        return self.folder / file_name(rank)

    def _near(self) -> set[int]:
        names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")  # torchrun's and deepspeed's
        num_local = int(next((os.environ[name] for name in names if name in os.environ), "1"))
        first = self._own.rank - int(os.environ.get("LOCAL_RANK", "0"))
        return {0, *range(first, first + num_local)}

    def _take(self, beat: Beat | None) -> None:
        if beat is None or beat.rank == self._own.rank:
            return
        if beat.rank not in self.peers and self.is_local(beat) and beat.time < self._since:  # of an earlier session
            return
        if beat.rank not in self.peers or self.peers[beat.rank].beat != beat:
            now = time.monotonic()
            self.peers[beat.rank] = Peer(beat, changed=now, ended=now if beat.state == "failed" else None)

    def _look_for_processes(self) -> None:
        for peer in list(self.peers.values()):
            if peer.runs and peer.ended is None and self.is_local(peer.beat) and not exists(peer.beat.pid):
                peer.ended = time.monotonic()


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def where(phase: str, step: int) -> str:
    return f"phase {phase} of step {step}" if step else f"phase {phase}"


def exists(pid: int) -> bool:
    """Whether the process exists and is no zombie (ended, but its parent has not yet read the exit code)."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def _read(path: Path) -> Beat | None:
    try:
        return Beat(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
