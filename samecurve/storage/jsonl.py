"""JSON lines files with one object per step, which stay intact despite a full disk, a kill or a resumed session."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from samecurve.errors import StorageError
from samecurve.storage.atomic import json_values, storage_errors, write_text


class JsonlFile:
    """A JSON lines file such as metrics.jsonl, written by a single process.

    The training loop appends, the checkpoint thread syncs.
    """

    def __init__(self, path: Path):
        self.path = path
        self._unwritten = ""
        self._lock = threading.Lock()

    def append(self, record: dict) -> None:
        """Append one line. Non-finite numbers become null, because NaN is not JSON.

        A failed write does not end the run: the line is kept in memory and written with the next one.
        """
        line = json.dumps(json_values(record), allow_nan=False) + "\n"
        with self._lock, contextlib.suppress(StorageError):
            self._unwritten += line
            self._write()

    def sync(self) -> None:
        """Sync the file, so that all appended lines survive a power cut. Raises StorageError."""
        with self._lock:
            self._write()
        # Outside of the lock, so that the loop's next line does not wait for the disk. fsync is about the file: it
        # covers what another descriptor wrote.
        if self.path.exists():
            with storage_errors(self.path), open(self.path, "a") as stream:
                os.fsync(stream.fileno())

    def truncate(self, step: int, target: Path, record: dict | None = None) -> int:
        """Keep the complete lines up to `step` and move all others to the folder `target`.

        Args:
            record: the line of `step`; appended if it is the only missing one.

        Returns:
            The number of lines moved.
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
        """Write all pending lines or none."""
        if not self._unwritten:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with storage_errors(self.path), open(self.path, "ab") as stream:
                stream.write(self._unwritten.encode())
        except StorageError:  # a full disk may have taken a part of the lines
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            raise
        self._unwritten = ""


def read_lines(path: Path) -> list[dict]:
    """Read one dict per line. Incomplete lines, left by a killed process, are skipped."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if _step(line) >= 0]


def _step(line: str) -> int:
    """Return the step of a line, -1 for an incomplete one."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1
    return step if isinstance(step, int) else -1
