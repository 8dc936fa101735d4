"""Content-addressed cache: each entry is a folder that is built once and verified whenever it is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from samecurve.errors import ConfigurationError, StorageError
from samecurve.storage.atomic import os_error, storage_error
from samecurve.storage.file_lock import lock_folder
from samecurve.storage.filesystem import LocalFileSystem, make_durable_folder
from samecurve.storage.verified_files import DamagedEntryError, FinishedEntry, NewEntry

_BUILDING = ".building-"  # begins the names of folders that are being built, or were when their builder was killed
_POLL_SECONDS = 0.2
_DAMAGED_POLL_SECONDS = 2.0  # to look costs reading the files
T = TypeVar("T")


def cache_folder(cache_dir: str | None) -> Path:
    """Return the cache folder: the recipe's `data.cache_dir`, else $SAMECURVE_CACHE, else ~/.cache/samecurve."""
    try:
        return Path(cache_dir or os.environ.get("SAMECURVE_CACHE") or "~/.cache/samecurve").expanduser()
    except RuntimeError as error:  # neither HOME nor an entry in /etc/passwd, as for any user id in a container
        raise ConfigurationError(
            "the cache: this user has no home folder; set data.cache_dir or SAMECURVE_CACHE to a folder, or HOME"
        ) from error


def digest(*parts: object) -> str:
    """Hash the parts, as JSON: the first 32 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def is_main_process() -> bool:
    """Whether this is rank 0 according to the launcher's environment. Works before there is a process group."""
    return os.environ.get("RANK", "0") == "0"


def build_once(target: Path, build: Callable[[NewEntry], None], load: Callable[[FinishedEntry], T]) -> T:
    """Return what `load` reads from the entry `target`; if it does not exist or is damaged, `build` fills it first.

    One process per machine builds (LOCAL_RANK 0), the others wait for the finished entry. No collective is used,
    because the process group's timeout would end a long build. If the builder dies, its launcher ends the waiting
    processes. Each process verifies what it reads: a note that another one has done so could be of an earlier start.

    Args:
        target: folder of the entry.
        build: writes the files of a new entry.
        load: reads files of a finished entry. May be called several times.

    Raises:
        StorageError: the cache cannot be written, or its disk damages what is written.
        Exception: any error of `build`, or of `load` except for DamagedEntryError.
    """
    is_builder = os.environ.get("LOCAL_RANK", "0") == "0"
    while True:
        wait = _POLL_SECONDS
        try:
            return load(FinishedEntry(target))
        except FileNotFoundError:
            pass
        except DamagedEntryError as error:
            wait = _DAMAGED_POLL_SECONDS
            if is_builder:
                with suppress(OSError):  # a full or closed output
                    print(f"{target}: {error}; this entry of the cache is built again", flush=True)
        if is_builder:
            break
        time.sleep(wait)
    try:
        _build_and_rename(target, build)
    except Exception as error:
        if (reason := os_error(error)) is None:
            raise
        raise StorageError(
            f"the cache could not be written: {storage_error(target, reason)}; set data.cache_dir (or SAMECURVE_CACHE) "
            "to another folder"
        ) from error
    try:
        return load(FinishedEntry(target))
    except DamagedEntryError as error:
        raise StorageError(
            f"{target}: {error}, right after it was written; delete this folder, check the disk and the memory of this "
            "machine, or set data.cache_dir (or SAMECURVE_CACHE) to a folder on another disk"
        ) from error


def _build_and_rename(target: Path, build: Callable[[NewEntry], None]) -> None:
    make_durable_folder(target.parent)
    with _locked_folder(target) as work:
        # remove what killed builds left beside `work`, which this process has locked, as each live builder has its own
        for folder in work.parent.glob(f"{_BUILDING}*"):
            # locked by a live builder, just removed, or of a user whose files stay
            with suppress(ConfigurationError, OSError), lock_folder(folder):
                shutil.rmtree(folder)
        new = work / "new"
        new.mkdir()
        entry = NewEntry(new)
        build(entry)
        entry.finish()
        while not _renamed(new, target) and not is_whole(target):
            with suppress(FileNotFoundError):  # another machine has moved it
                target.rename(work / f"damaged-{uuid.uuid4().hex}")
        LocalFileSystem().sync_folder(target.parent)


def _renamed(new: Path, target: Path) -> bool:
    """Whether the new entry is in place; False if there is one, which may be damaged, or whole from another machine."""
    try:
        new.rename(target)
    except OSError:
        if not target.exists():
            raise
        return False
    return True


def is_whole(target: Path) -> bool:
    """Whether there is an entry, and all of its files are what was written."""
    try:
        FinishedEntry(target).verify()
    except (DamagedEntryError, OSError):
        return False
    return True


@contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    """Create and lock a folder beside `target` to build in, which is removed at the end."""
    with ExitStack() as stack:
        while True:
            # a name of its own: on a shared disk other machines may build the same entry
            work = target.parent / f"{_BUILDING}{target.name}-{uuid.uuid4().hex}"
            work.mkdir()
            # another builder may sweep the folder before it is locked
            with suppress(ConfigurationError, FileNotFoundError):
                stack.callback(lock_folder(work).close)
                if work.is_dir():
                    break
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        yield work
