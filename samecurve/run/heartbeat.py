"""Heartbeat files: ranks observe each other without a collective.

Each rank rewrites a small file every few seconds:

    output_dir/heartbeats/rank_00001.json

In a large run, other files pass on the few heartbeats that matter to other hosts (heartbeat_relay.py).

Rank 0 removes an earlier session's files before any rank of this session writes one: heartbeats begin only after all
ranks have started (see `Heartbeats.start`). If hosts do not share the directory, only ranks of the same host are
visible, and files of an earlier session on the same machine are recognized by their time.

Freshness compares no clocks of different hosts: a heartbeat is fresh as long as it keeps changing. Ranks of one machine
also check whether each other's processes exist.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from samecurve.run.beats import Beat, Peer, State, file_name, read_beat, write_beat
from samecurve.run.heartbeat_relay import Relay

LAST_WORD_SECONDS = 20.0  # less than watchdog.LAST_RESORT_SECONDS, after which the process is gone
STALE_BEATS = 3  # a beat or two may be late on slow storage
# With more ranks than this, nobody reads the files of all (see heartbeat_relay.py).
MOST_FILES = 64


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
        names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")  # torchrun's and deepspeed's
        num_local = int(next((os.environ[name] for name in names if name in os.environ), "1"))
        first = self._own.rank - int(os.environ.get("LOCAL_RANK", "0"))
        self._local = range(first, first + num_local)
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        is_large = num_ranks > MOST_FILES and len(self._local) < num_ranks
        self._relay = Relay(folder, self._own.rank, self._local, STALE_BEATS * every) if is_large else None

    def clear(self) -> None:
        """Remove an earlier session's files. For rank 0, when it owns the run directory but before ranks meet."""
        for pattern in ("*rank_*", "*host_*", "*world*"):  # also the .partial file of a write that was killed
            self._remove(pattern)

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

    def write(
        self, state: State | None = None, reason: str = "", exit_code: int = 0, has_reported: bool = False
    ) -> None:
        """Write a heartbeat, after waiting for a write in progress (which can take long on slow storage).

        Storage errors are ignored: the next heartbeat carries the same information.

        Args:
            state: the state from now on; None keeps the current one.
            reason, exit_code, has_reported: describe a failure, as in a Beat.
        """
        if state is not None:
            final = {"reason": reason, "exit_code": exit_code, "has_reported": has_reported}
            self._own = replace(self._own, state=state, **final)
        patience = LAST_WORD_SECONDS if state in ("finished", "failed") else self.every
        if not self.started or not self._lock.acquire(timeout=patience):
            return
        try:
            write_beat(self.folder, self._current())
            if self._relay and state is not None:
                self._relay.write(self._current(), list(self.peers.values()))
        finally:
            self._lock.release()

    def look(self, at_all: bool = True) -> None:
        """Read the other ranks' files and check their processes.

        Args:
            at_all: False reads only the files of rank 0 and of this host's ranks: every rank reading every file each
                few seconds would overload a shared file system. Rank 0 reads all of them, and its own file tells the
                others of a failure or hang. Beyond MOST_FILES ranks, `Relay.read` takes the place of both.
        """
        with contextlib.suppress(OSError):
            if self._relay:
                beats = [*map(self._read, self._local), *self._relay.read()]
                self._forget_others({*self._local, *(beat.rank for beat in beats if beat)})
            elif at_all:
                beats = [read_beat(path) for path in self.folder.glob("rank_*.json")]
            else:
                near = {0, *self._local}
                beats = [self._read(rank) for rank in near]
                self._forget_others(near)
            for beat in beats:
                self._take(beat)
            if self._relay:
                self._relay.write(self._current(), list(self.peers.values()))
            self.looked = time.monotonic()
        self._look_for_processes()

    def is_local(self, beat: Beat) -> bool:
        return beat.machine == self._own.machine

    def restart(self) -> None:
        """Restart the freshness measurement: this process was suspended, and perhaps the others too."""
        self.looked = time.monotonic()
        for peer in list(self.peers.values()):
            peer.changed = self.looked
        if self._relay:
            self._relay.restart()

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

    def _current(self) -> Beat:
        final = {name: getattr(self._own, name) for name in ("state", "reason", "exit_code", "has_reported")}
        return replace(self._describe(), time=time.time(), **final)

    def _forget_others(self, read: set[int]) -> None:
        """Forget peers that are no longer read: they would look frozen. A failure stays known."""
        for rank in [rank for rank, peer in list(self.peers.items()) if rank not in read and peer.runs]:
            self.peers.pop(rank, None)

    def _read(self, rank: int) -> Beat | None:
        return read_beat(self.folder / file_name(rank))

    def _take(self, beat: Beat | None) -> None:
        if beat is None or beat.rank == self._own.rank:
            return
        if beat.rank not in self.peers and self.is_local(beat) and beat.time < self._since:  # of an earlier session
            return
        if beat.rank not in self.peers or self.peers[beat.rank].beat != beat:
            now = time.monotonic()
            self.peers[beat.rank] = Peer(beat, changed=now, ended=now if beat.state == "failed" else None)

    def _look_for_processes(self) -> None:
        # a copy: other threads, such as the watchdog's, call `look` at the same time
        for peer in list(self.peers.values()):
            if peer.runs and peer.ended is None and self.is_local(peer.beat) and not exists(peer.beat.pid):
                peer.ended = time.monotonic()


def exists(pid: int) -> bool:
    """Whether the process exists and is no zombie (ended, but its parent has not yet read the exit code)."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # such as AccessDenied: there is a process
        return True
