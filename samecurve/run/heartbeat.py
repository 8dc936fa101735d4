"""Heartbeat files: ranks observe each other without a collective.

Each rank rewrites a small file every few seconds:

    output_dir/heartbeats/rank_00001.json

In a run of more than MOST_FILES ranks, other files pass on the heartbeats that a conclusion may depend on:

    heartbeats/host_00008.json    by the first rank of a host.  "up": heartbeats of this host, for rank 0;
                                  "down": those of all hosts, for this host's ranks
    heartbeats/world.json         by rank 0: heartbeats of all hosts, for the first rank of each host

A rank reads the files of its own host's ranks and one of these. Rank 0 alone reads one of each host, and the files of
a host's ranks if the host's own file does not change any more. News takes four heartbeats at most.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from samecurve.run.beats import Beat, Peer, State, beat_of, file_name, read_beat, write_beat, write_object
from samecurve.storage.records import read_record

LAST_WORD_SECONDS = 20.0  # less than watchdog.LAST_RESORT_SECONDS, after which the process is gone
STALE_BEATS = 3  # a beat or two may be late on slow storage
MOST_FILES = 64  # with more ranks than this, nobody reads the files of all, see Relay
WORLD = "world.json"
_HOST_SCHEMA = {"num_ranks": range(1, 1025), "up": list, "down": list}
_WORLD_SCHEMA = {"beats": list}


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
                if beat is None or beat.rank == self._own.rank:
                    continue
                known = self.peers.get(beat.rank)
                if known is None and self.is_local(beat) and beat.time < self._since:  # of an earlier session
                    continue
                if known is None or known.beat != beat:
                    now = time.monotonic()
                    self.peers[beat.rank] = Peer(beat, changed=now, ended=now if beat.state == "failed" else None)
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


class Relay:
    """Reads and writes the files that pass on heartbeats.

    Args:
        folder: output_dir/heartbeats.
        rank: this rank.
        local: the ranks of this host.
        stale: seconds after which an unchanged file is no longer used to learn of other ranks. Its heartbeats do not
            change either, so that all of them would look frozen.
    """

    def __init__(self, folder: Path, rank: int, local: range, stale: float):
        self._folder, self._rank, self._local, self._stale = folder, rank, local, stale
        self._host = folder / f"host_{local.start:05d}.json"
        self._down: list[Beat] = []
        self._changed: dict[Path, tuple[dict, float]] = {}

    def read(self) -> list[Beat]:
        """Read the heartbeats of other hosts."""
        if self._rank == 0:
            beats = []
            for path in self._folder.glob("host_*.json"):
                if path == self._host:
                    continue
                content, is_fresh = self._read(path)
                up = _beats(content, "up")
                if up and not (is_fresh and up[0].state == "running"):
                    # the host's first rank has ended or is stuck, and passes on nothing any more
                    ranks = range(up[0].rank, up[0].rank + content["num_ranks"])
                    up = [beat for rank in ranks if (beat := read_beat(self._folder / file_name(rank)))]
                beats += up
        elif self._rank == self._local.start:
            content, is_fresh = self._read(self._folder / WORLD, _WORLD_SCHEMA)
            beats = _beats(content, "beats")
            # if stale, rank 0's own: it is the one that does not write any more
            beats = self._down = beats if is_fresh else beats[:1]
        else:
            content, is_fresh = self._read(self._host)
            beats = _beats(content, "down") if is_fresh else []
        return [beat for beat in beats if beat.rank not in self._local]

    def write(self, own: Beat, peers: Sequence[Peer]) -> None:
        """Write the host's file, and on rank 0 world.json. Does nothing unless this is the host's first rank."""
        if self._rank != self._local.start:
            return
        if self._rank == 0:
            self._down = notable(own, peers)
            write_object(self._folder / WORLD, {"beats": [asdict(beat) for beat in self._down]})
        up = notable(own, [peer for peer in peers if peer.beat.rank in self._local])
        content = {"num_ranks": len(self._local)}
        content |= {"up": [asdict(beat) for beat in up], "down": [asdict(beat) for beat in self._down]}
        write_object(self._host, content)

    def restart(self) -> None:
        """Let all files count as fresh: this process was suspended, and perhaps the others too."""
        now = time.monotonic()
        self._changed = {path: (content, now) for path, (content, _) in self._changed.items()}

    def _read(self, path: Path, schema: Any = _HOST_SCHEMA) -> tuple[dict, bool]:
        """Return a file's content, {} if there is none yet, and whether it changed lately."""
        now = time.monotonic()
        before, changed = self._changed.get(path, ({}, now))
        # storage may fail for a moment: then the file counts as unchanged
        content = read_record(path, schema).value or before
        if content != before:
            changed = now
        self._changed[path] = content, changed
        return content, now - changed <= self._stale


def notable(own: Beat, peers: Sequence[Peer]) -> list[Beat]:
    """Choose the heartbeats that Liveness may draw a conclusion from: the own one, then those of at most 12 peers.

    These are failures, the rank that has reported one, hangs, the ranks that show no sign of life for the longest time,
    those furthest behind and ahead, the busiest one, and the lowest one, which may have to report.
    """
    failed = sorted((peer for peer in peers if peer.beat.state == "failed"), key=lambda peer: peer.beat.time)
    running = [peer for peer in peers if peer.runs and peer.ended is None]
    hanging = [peer for peer in running if peer.beat.state == "hanging"]
    by_progress = sorted(running, key=lambda peer: (peer.beat.num_phases, peer.beat.num_marks))
    reporters = [peer for peer in failed if peer.beat.has_reported]
    chosen = [*failed[:2], *reporters[:1], *hanging[:1], *by_progress[:3], *by_progress[-1:]]
    chosen += sorted(running, key=lambda peer: peer.changed)[:2]
    chosen += sorted(running, key=lambda peer: peer.beat.idle_seconds)[:1]
    chosen += sorted(running, key=lambda peer: peer.beat.rank)[:1]
    return [own, *{peer.beat.rank: peer.beat for peer in chosen}.values()]


def _beats(content: dict, key: str) -> list[Beat]:
    return [beat for item in content.get(key, []) if (beat := beat_of(item))]
