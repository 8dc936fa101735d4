"""What ranks see of each other without a collective: a small file each, which its process rewrites every few seconds.

    output_dir/heartbeats/rank_00001.json

An earlier session's files are removed before this one's are there: ranks beat only after all have started (see
`start`). Those of the own machine are also told by their time, where hosts do not share the directory; then only the
ranks of the own host are seen. Clocks of different hosts are not compared: a beat is fresh while it changes. Ranks of
one machine also see whether the process still exists.
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
    """machine: the same text where process ids mean the same. time: of this beat, seconds since 1970.

    num_phases, num_marks: calls of `phase`, and of `progress` since the last one. idle_seconds: since the last of both.
    reason, exit_code: of a failure.
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
    """changed: when its beat last did. ended: when it was first seen failed or gone, None while it lives. Monotonic."""

    beat: Beat
    changed: float
    ended: float | None = None

    @property
    def runs(self) -> bool:
        """As far as it says itself."""
        return self.beat.state in ("running", "hanging")

    @property
    def died(self) -> bool:
        """Its process is gone, and it did not say why."""
        return self.ended is not None and self.runs


class Heartbeats:
    """This rank's file and what the others' say. describe: makes the beat to write; its time and state are set here.

    every: seconds between two beats. peers: by rank, without this one. looked: when they were last read. wide: whether
    all files are read each time, see `look`.
    Nothing is written before `start`: until all ranks are there, the directory may be another run's.
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
        """By rank 0, to whom the directory belongs by then, before it meets the others."""
        self._remove("*rank_*")

    def _remove(self, pattern: str) -> None:
        with contextlib.suppress(OSError):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def start(self) -> None:
        """Once all ranks are there, and no host refuses the start any more (status.py)."""
        self.started = True
        if self._own.rank == 0:
            self._remove("refused_*")
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def write(self, state: State | None = None, reason: str = "", exit_code: int = 0) -> None:
        """A disk that takes nothing is not this file's business: the beat is left out, and the next one says the same.

        state: from now on. A write that is under way may have to end first, on slow storage.
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
        """Read the others' files and look for their processes.

        at_all: False looks at rank 0 and at the own machine's ranks only. If all ranks of a large run read all files
        every few seconds, a shared file system would be busy with that; rank 0 does, and its own file says what it saw.
        """
        with contextlib.suppress(OSError):
            if at_all:
                paths = list(self.folder.glob("rank_*.json"))
            else:
                near = self._near()
                paths = [self._path(rank) for rank in near]
                self._forget_all_but(near)
            for path in paths:
                self._take(_read(path))
            self.looked = time.monotonic()
        self._look_for_processes()

    def is_local(self, beat: Beat) -> bool:
        return beat.machine == self._own.machine

    def restart(self) -> None:
        """This process slept, and the others perhaps too: whether they are fresh is seen from now on."""
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

    def _forget_all_but(self, near: set[int]) -> None:
        """What is not read any more would look frozen."""
        for rank, peer in list(self.peers.items()):
            if rank not in near and peer.runs:
                self.peers.pop(rank, None)

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
    """Whether the process still does something: not one that ended and whose parent did not ask for its exit code."""
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
