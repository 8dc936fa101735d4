"""JSON lines files with one object per step, which stay intact despite a full disk, a kill or a resumed session."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from samecurve.errors import StorageError
from samecurve.storage.atomic import json_values, storage_errors, write_bytes
from samecurve.storage.records import COUNT, MOST_BYTES, parse

_PIECE = 2**16  # bytes
MOST_RECORDS = 4096  # of EvenlySpaced
STEP = {"step": COUNT}  # the schema of a line of which nothing else is known


class JsonlFile:
    """A JSON lines file such as metrics.jsonl, written by a single process.

    The training loop appends, the checkpoint thread syncs. schema: of a line, see records.py.
    """

    def __init__(self, path: Path, schema: Any = STEP):
        self.path, self._schema = path, schema
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

    def truncate(self, step: int, target: Path, record: dict | None = None) -> tuple[int, int]:
        """Keep the good lines up to `step` and move all others to the folder `target`.

        Reads each line once, and those behind the first one to move again; keeps one in memory. What is kept is not
        written again unless there is a damaged line within it.

        Args:
            record: the line of `step`; appended if it is the only missing one. It replaces a line that lacks some of
                its keys, those of an evaluation that was made later.

        Returns:
            The number of moved lines that are of later steps, and the number of those that are damaged.
        """
        num_moved = num_damaged = last = offset = 0
        start, is_whole, is_kept_behind = None, True, False  # start: of the first line to move

        needed = (record or {}).keys()

        def is_kept(value: dict | None) -> bool:
            return value is not None and (value["step"] < step or (value["step"] == step and value.keys() >= needed))

        for line, value in scan(self.path, self._schema):
            if value is not None and is_kept(value):
                last, is_whole, is_kept_behind = value["step"], line.endswith(b"\n"), start is not None
            else:
                start = offset if start is None else start
                num_moved += 1
                num_damaged += value is None
            offset += len(line)
        if start is not None:
            write_bytes(target / self.path.name, self._behind(start, is_kept, False))
            if is_kept_behind:
                write_bytes(self.path, chain(_pieces(self.path, start), self._behind(start, is_kept, True)))
            else:
                with storage_errors(self.path):
                    os.truncate(self.path, start)
        added = "" if is_whole or is_kept_behind else "\n"
        if record and last == step - 1:
            added += json.dumps(json_values(record), allow_nan=False) + "\n"
        if added:
            with self._lock:
                self._unwritten += added
        if added or start is not None:
            self.sync()
        return num_moved - num_damaged, num_damaged

    def _behind(self, start: int, is_kept: Callable[[dict | None], bool], kept: bool) -> Iterator[bytes]:
        """Yield the whole lines from the byte `start` on that are kept, or those that are not."""
        for line, value in scan(self.path, self._schema, start):
            if kept == is_kept(value):
                yield line if line.endswith(b"\n") else line + b"\n"

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


class EvenlySpaced:
    """Records at evenly spaced steps, and the last one: all up to MOST_RECORDS, then each second, each fourth, ..."""

    def __init__(self) -> None:
        self._records: list[dict] = []
        self.last: dict = {}
        self.num_added, self._spacing = 0, 1

    def __iter__(self) -> Iterator[dict]:
        yield from self._records
        if self._records and self.last is not self._records[-1]:
            yield self.last

    def add(self, record: dict) -> None:
        self.last = record
        if self.num_added % self._spacing == 0:
            self._records.append(record)
            if len(self._records) > MOST_RECORDS:
                del self._records[1::2]
                self._spacing *= 2
        self.num_added += 1


def scan(path: Path, schema: Any = STEP, start: int = 0) -> Iterator[tuple[bytes, dict | None]]:
    """Yield each line as it is in the file, and its value: None if it is damaged or does not fit the schema.

    One line is in memory at a time. Without a file there are no lines. Raises StorageError if it cannot be read.

    Args:
        start: the byte to begin at, the first one of a line.
    """
    with storage_errors(path):
        try:
            stream = open(path, "rb")
        except FileNotFoundError:
            return
        with stream:
            stream.seek(start)
            for line in iter(lambda: stream.readline(MOST_BYTES), b""):
                yield line, parse(line, schema)[0]


def last_record(path: Path, schema: Any = STEP) -> dict | None:
    """Return the value of the last good line, None without one. Reads from the end, whatever the file's size."""
    with storage_errors(path):
        try:
            stream = open(path, "rb")
        except FileNotFoundError:
            return None
        with stream:
            start, rest = stream.seek(0, os.SEEK_END), b""
            while start > 0:
                size = min(_PIECE, start)
                start = stream.seek(start - size)
                first, *lines = (stream.read(size) + rest).split(b"\n")
                for line in reversed(lines if start else [first, *lines]):
                    if (value := parse(line, schema)[0]) is not None:
                        return value
                rest = first if len(first) <= 16 * _PIECE else b""  # no record is that long, but a run of NULs may be
    return None


def _pieces(path: Path, end: int) -> Iterator[bytes]:
    """Yield the first `end` bytes of a file."""
    with open(path, "rb") as stream:
        while end > 0 and (piece := stream.read(min(_PIECE, end))):
            end -= len(piece)
            yield piece
