"""Content-addressed cache: each entry is a directory that is built once and, if it exists, is complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from samecurve.errors import StorageError

_POLL_SECONDS = 0.2


def cache_folder(cache_dir: str | None) -> Path:
    """Return the cache folder: the recipe's `data.cache_dir`, else $SAMECURVE_CACHE, else ~/.cache/samecurve."""
    return Path(cache_dir or os.environ.get("SAMECURVE_CACHE") or "~/.cache/samecurve").expanduser()


def digest(*parts: object) -> str:
    """Hash the parts, as JSON: the first 32 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def is_main_process() -> bool:
    """Whether this is rank 0 according to the launcher's environment. Works before there is a process group."""
    return os.environ.get("RANK", "0") == "0"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`; if it does not exist, `build(temporary directory)` fills it first.

    One process per machine builds (LOCAL_RANK 0), the others wait for the finished directory. No collective is used,
    because the process group's timeout would end a long build. If the builder dies, its launcher ends the waiting
    processes.

    Raises:
        StorageError: the cache cannot be written.
        Exception: any error of `build`.
    """
    if target.is_dir():
        return target
    if os.environ.get("LOCAL_RANK", "0") != "0":
        while not target.is_dir():
            time.sleep(_POLL_SECONDS)
        return target
    try:
        _build_and_rename(target, build)
    except OSError as error:
        raise StorageError(
            f"{error.filename or target}: the cache could not be written ({error.strerror or error}); "
            "free some space or set data.cache_dir (or SAMECURVE_CACHE) to a folder that can be written"
        ) from error
    return target


def _build_and_rename(target: Path, build: Callable[[Path], None]) -> None:
    # a name of its own: on a shared disk other machines may build the same entry
    temporary = target.parent / f".building-{target.name}-{uuid.uuid4().hex}"
    temporary.mkdir(parents=True)
    try:
        build(temporary)
        try:
            temporary.rename(target)
        except OSError:
            # On a shared file system, another machine may have finished first, with the same content.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
