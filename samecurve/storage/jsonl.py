"""Files of one JSON object per line and step, which a full disk, a kill and a session that goes on do not tear."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from samecurve.errors import StorageError
from samecurve.storage.atomic import json_values, storage_errors, write_text


class JsonlFile:
    """metrics.jsonl and its like, for the one process that writes them: its loop appends, and who saves syncs."""

    def __init__(self, path: Path):
        self.path = path
        self._unwritten = ""
        self._lock = threading.Lock()

    def append(self, record: dict) -> None:
        """What is not finite is written as null: NaN is not JSON.

        A line that the disk does not take is no reason to end the run: it is kept, and goes with the next one.
        """
        line = json.dumps(json_values(record), allow_nan=False) + "\n"
        with self._lock, contextlib.suppress(StorageError):
            self._unwritten += line
            self._write()

    def sync(self) -> None:
        """What was appended survives a power cut from here on. Raises StorageError."""
        with self._lock:
            self._write()
        if self.path.exists():
            with storage_errors(self.path), open(self.path, "a") as stream:
                os.fsync(stream.fileno())

    def truncate(self, step: int, target: Path, record: dict | None = None) -> int:
        """Lines up to `step` stay, whole and each once. Returns how many others went to the folder `target`.

        record: added where it is the one that is missing.
        """
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in lines if 0 <= _step(line) <= step]
        others = [line for line in lines if not 0 <= _step(line) <= step]
        if record and (_step(kept[-1]) if kept else 0) == step - 1:
            kept.append(json.dumps(json_values(record), allow_nan=False))
        if others:
            (target / self.path.name).write_text("".join(f"{line}\n" for line in others), encoding="utf-8")
        if kept != lines:
            write_text(self.path, "".join(f"{line}\n" for line in kept))
        return len(others)

    def _write(self) -> None:
        """All lines that wait, or none."""
        if not self._unwritten:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with storage_errors(self.path), open(self.path, "ab") as stream:
                stream.write(self._unwritten.encode())
        except StorageError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            raise
        self._unwritten = ""


def read_lines(path: Path) -> list[dict]:
    """One dict per line. A line that a killed process wrote half of is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if _step(line) >= 0]


def _step(line: str) -> int:
    """-1 for half a line."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1
