"""Atomic writes of small files, and storage errors that name the path and the reason."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from samecurve.errors import SamecurveError, StorageError

MIB = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# numpy's tofile gives no errno
_OF_A_LIBRARY = re.compile(r"\(os error (\d+)\)|\d+ requested and \d+ written")


@contextmanager
def storage_errors(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError (full disk, no permission) into a StorageError that names the path, the errno and the room.

    num_bytes: what the body writes, if known.
    """
    try:
        yield
    except Exception as error:
        if (reason := os_error(error)) is None:
            raise
        raise storage_error(path, reason, num_bytes) from error


def os_error(error: BaseException) -> OSError | None:
    """Return the OSError that an exception is or reports; None for others.

    safetensors and tokenizers, which are written in Rust, raise classes of their own with the errno in the text.
    """
    match = None if isinstance(error, SamecurveError) else _OF_A_LIBRARY.search(str(error))
    if isinstance(error, OSError) and (error.errno or not match):
        return error
    if match is None:
        return None
    number = int(match[1] or errno.ENOSPC)
    return OSError(number, os.strerror(number))


def storage_error(path: Path, error: OSError, num_bytes: int | None = None) -> StorageError:
    """Return the StorageError for an OSError, with what is needed and free where the disk is full."""
    code = errno.errorcode.get(error.errno or 0, "unknown")
    name = error.filename2 or error.filename  # of a copy, the target
    path = Path(os.fsdecode(name)) if isinstance(name, (str, bytes)) else path
    text = f"{path}: {error.strerror or error} (errno {error.errno}, {code})"
    if error.errno in FULL:
        existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
        needed = "" if num_bytes is None else f"{num_bytes / MIB:,.1f} MiB are needed, "
        text += f"; {needed}{shutil.disk_usage(existing).free / MIB:,.1f} MiB are free; free some space there"
    return StorageError(text)


def known_cause(error: BaseException) -> SamecurveError | None:
    """Return the error to report for a full disk or too little memory, also where others followed; None otherwise."""
    link: BaseException | None = error
    while link is not None:
        reason = os_error(link)
        if reason is not None and reason.errno in FULL:
            return storage_error(Path(), reason)
        if isinstance(link, MemoryError):
            frame = traceback.extract_tb(link.__traceback__)[-1]
            text = f"out of host memory in {frame.filename}:{frame.lineno} ({frame.name})"
            return SamecurveError(f"{text}: {link}" if str(link) else text)
        link = link.__cause__ or link.__context__
    return None


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file atomically: readers never see a partial file, and a full disk leaves the old one intact."""
    write_text(path, json.dumps(json_values(content), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_json` does. Raises StorageError.

    A lone surrogate, as Python reads a byte of a file name that is not UTF-8, is written as `\\udcff`.
    """
    write_bytes(path, [text.encode(errors="backslashreplace")])


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


def utc_timestamp() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
