"""The content of a heartbeat, and its file."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from samecurve.storage.records import COUNT, mismatch, read_record

State = Literal["running", "hanging", "finished", "failed"]
_SCHEMA = {
    **{key: COUNT for key in ("rank", "pid", "step", "num_phases", "num_marks")},
    **{key: str for key in ("host", "machine", "phase")},
    "idle_seconds": float,
    "time?": float,
    "state?": str,
    "reason?": str,
    "exit_code?": int,
    "has_reported?": bool,
    "*": (),
}


@dataclass(frozen=True)
class Beat:
    """Content of one heartbeat file.

    Attributes:
        machine: equal for processes whose process ids can be compared, see `storage.file_lock.machine`.
        num_phases: number of calls of `HangWatchdog.phase`.
        num_marks: number of calls of `HangWatchdog.progress` since the last call of `phase`.
        idle_seconds: time since the last call of either.
        time: when this heartbeat was written, in seconds since 1970.
        reason, exit_code: describe a failure.
        has_reported: this rank prints why the run ends, so the others need not.
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
    has_reported: bool = False

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


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def where(phase: str, step: int) -> str:
    return f"phase {phase} of step {step}" if step else f"phase {phase}"


def read_beat(path: Path) -> Beat | None:
    """Read one rank's file; None if it cannot be read."""
    return beat_of(read_record(path).value)


def beat_of(content: Any) -> Beat | None:
    """Rebuild a heartbeat from its JSON object; None if its keys or types are not those of a Beat."""
    return None if mismatch(content, _SCHEMA) else Beat(**content)


def write_beat(folder: Path, beat: Beat) -> None:
    write_object(folder / file_name(beat.rank), asdict(beat))


def write_object(path: Path, content: Any) -> None:
    """Replace a JSON file. Storage errors are ignored: the next heartbeat carries the same information."""
    # Unlike atomic.write_json this does not wait for the disk: no heartbeat is read after a power cut.
    partial = path.with_name(f".{path.name}.partial")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content), encoding="utf-8")
        os.replace(partial, path)
