"""What a rank reads when it looks at the heartbeats of the others."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.scale.operations import RANKS_PER_HOST


def count_heartbeats(folder: Path, size: int) -> dict[str, tuple[int, int, float]]:
    """Write the heartbeats of a run and let three of its ranks look at them.

    Returns:
        For rank 0, the first rank of another host and a rank that is no first one: (files, bytes, milliseconds) per
        look.
    """
    from samecurve.run import beats, heartbeat
    from samecurve.run.beats import Beat, Peer, write_beat
    from samecurve.run.heartbeat import Heartbeats
    from samecurve.storage.records import Record

    def beat(number: int) -> Beat:
        host = number // RANKS_PER_HOST
        return Beat(number, os.getpid(), f"host{host}", f"machine {host}", "step", 12, 40, 3, 1.5, time.time())

    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST)}
    for number in range(size):
        write_beat(folder, beat(number))
    for first in range(0, size, RANKS_PER_HOST):
        local = range(first, first + RANKS_PER_HOST)
        peers = [Peer(beat(number), time.monotonic()) for number in local[1:]]
        if size > heartbeat.MOST_FILES:
            heartbeat.Relay(folder, first, local, stale=15.0).write(beat(first), peers)
    found, read = {}, beats.read_record
    for name, number in {"rank 0": 0, "first rank of a host": 8, "another rank": 9}.items():
        os.environ["LOCAL_RANK"] = str(number % RANKS_PER_HOST)
        own = Heartbeats(folder, lambda number=number: beat(number), 5.0, 1.0)
        own.look()  # writes what others read, for a first rank
        paths: list[Path] = []

        def counting(path: Path, *schema: Any, paths: list[Path] = paths) -> Record:
            paths.append(path)
            return read(path, *schema)

        began = time.perf_counter()
        own.look()
        seconds = time.perf_counter() - began
        with (
            mock.patch.object(beats, "read_record", counting),
            mock.patch.object(heartbeat, "read_record", counting),
        ):
            own.look()
        found[name] = len(paths), sum(path.stat().st_size for path in paths if path.exists()), 1000 * seconds
    return found
