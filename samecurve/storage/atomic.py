"""Atomic writes of small files, and storage errors that name the path and the reason."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from samecurve.errors import StorageError


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError (full disk, no permission) into a StorageError that names the path and the errno."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "unknown")
        reason = error.strerror or str(error)
        raise StorageError(f"{error.filename or path}: {reason} (errno {error.errno}, {code})") from error


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file atomically: readers never see a partial file, and a full disk leaves the old one intact."""
    write_text(path, json.dumps(json_values(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_json` does. Raises StorageError."""
    write_bytes(path, [text.encode()])


def write_bytes(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file of several pieces as `write_json` does. Raises StorageError."""
    temporary = path.with_name(f".{path.name}.partial")
    with storage_errors(path):
        with open(temporary, "wb") as stream:
            stream.writelines(pieces)
            stream.flush()
            # otherwise a power cut could keep the new name without the content
            os.fsync(stream.fileno())
        os.replace(temporary, path)


def json_values(value: Any) -> Any:
    """Convert a value to JSON types: non-finite floats become None, NumPy and torch scalars Python numbers.

    Keys, and values of any other type such as paths, become strings.
    """
    if isinstance(value, dict):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):
        return json_values(value.item())
    return str(value)


def read_json(path: Path) -> dict:
    """Read a JSON object; {} if the file does not exist. Raises OSError or ValueError if it cannot be read."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def utc_timestamp() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
