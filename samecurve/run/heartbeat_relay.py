"""Heartbeats of other hosts in large runs: only those that a conclusion may depend on, in a few files.

    heartbeats/host_00008.json    by the first rank of a host.  "up": heartbeats of this host, for rank 0;
                                  "down": those of all hosts, for this host's ranks
    heartbeats/world.json         by rank 0: heartbeats of all hosts, for the first rank of each host

A rank reads the files of its own host's ranks and one of these. Rank 0 alone reads one of each host, and the files of
a host's ranks if the host's own file does not change any more. News takes four heartbeats at most.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samecurve.run.beats import Beat, Peer, beat_of, file_name, read_beat, write_object
from samecurve.storage.records import read_record

WORLD = "world.json"
_HOST_SCHEMA = {"num_ranks": range(1, 1025), "up": list, "down": list}
_WORLD_SCHEMA = {"beats": list}


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
            beats = [beat for path in self._folder.glob("host_*.json") if path != self._host for beat in self._of(path)]
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

    def _of(self, host: Path) -> list[Beat]:
        content, is_fresh = self._read(host)
        beats = _beats(content, "up")
        if not beats or (is_fresh and beats[0].state == "running"):
            return beats
        # the host's first rank has ended or is stuck, and passes on nothing any more
        first = beats[0].rank
        beats = [read_beat(self._folder / file_name(rank)) for rank in range(first, first + content["num_ranks"])]
        return [beat for beat in beats if beat]

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
