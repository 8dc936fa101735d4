"""Content-addressed cache: each entry is a folder that is built once and verified whenever it is read.

Its files are hashed by xxh3_128, in blocks of 1 MiB. The hash finds damage (a power cut, a bad disk or copy, another
program) at about the speed of memory: 23 GB/s on an EPYC core with 1.8 GB/s of SHA-256 (xxhash 4.1.0, 2026-11-28). It
does not stop an attacker, who could write the manifest as well.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import xxhash

from samecurve.errors import ConfigurationError, StorageError
from samecurve.storage.atomic import os_error, storage_error
from samecurve.storage.file_lock import lock_folder
from samecurve.storage.filesystem import LocalFileSystem, make_durable_folder
from samecurve.storage.records import read_record

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
        while True:
            try:
                new.rename(target)
                break
            except OSError:
                if not target.exists():
                    raise
            if is_whole(target):  # from another machine
                break
            with suppress(FileNotFoundError):  # another machine has moved it
                target.rename(work / f"damaged-{uuid.uuid4().hex}")
        LocalFileSystem().sync_folder(target.parent)


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


MOST_MANIFEST_BYTES = 2**30  # of 30 TiB: a block of 1 MiB has 36 bytes there
BLOCK_BYTES = 1 << 20
MANIFEST = "files.json"


class DamagedEntryError(Exception):
    """A cache entry is not what was written. The message says which file, and how it differs."""


class FileHashes(NamedTuple):
    """Size of a file in bytes and the hash of each of its blocks, in hexadecimal."""

    size: int
    blocks: list[str]


class NewEntry:
    """A cache entry that is being built in `folder`, which exists. Every file of the entry is made by `create`."""

    def __init__(self, folder: Path):
        self._folder, self._files = folder, {}

    def create(self, name: str) -> HashedFile:
        """Open a new file for writing bytes. Closing it makes it durable and records its hashes."""
        return HashedFile(self._folder / name, self._files)

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        with self.create(name) as file:
            file.write(content)

    def finish(self) -> None:
        """Write the manifest and make the folder durable."""
        files = {name: hashes._asdict() for name, hashes in self._files.items()}
        self.write(MANIFEST, json.dumps({"files": files, "xxh3_128": _hash_of(files)}).encode())
        LocalFileSystem().sync_folder(self._folder)


class HashedFile(io.BufferedIOBase):
    """A file that is hashed while it is written, and synced when it is closed."""

    def __init__(self, path: Path, files: dict[str, FileHashes]):
        """files: gets the hashes under the file's name when it is closed."""
        self._file, self.name, self._files = open(path, "wb", buffering=0), path.name, files
        self._size, self._blocks, self._pending = 0, [], bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        content, start = memoryview(data).cast("B"), 0
        while start < len(content):
            piece = content[start : start + BLOCK_BYTES - len(self._pending)]
            self._pending += piece
            start += len(piece)
            if len(self._pending) == BLOCK_BYTES:
                self._write_block()
        return len(content)

    def _write_block(self) -> None:
        rest = memoryview(bytes(self._pending))
        self._blocks.append(xxhash.xxh3_128_hexdigest(rest))
        self._size += len(rest)
        self._pending.clear()
        while rest:  # an unbuffered write may be short
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        if self.closed:
            return
        try:
            if self._pending:
                self._write_block()
            if self._size:
                LocalFileSystem().sync(self._file)
            self._files[self.name] = FileHashes(self._size, self._blocks)
        finally:
            self._file.close()
            super().close()


class FinishedEntry:
    """A finished cache entry. Every method verifies the files that it names.

    Raises:
        FileNotFoundError: there is no entry.
        DamagedEntryError: the entry, or a file of it, is not what was written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not os.path.exists(folder):  # False also for what cannot be looked at
            raise FileNotFoundError(folder)
        record = read_record(folder / MANIFEST, {"files": dict, "xxh3_128": str}, MOST_MANIFEST_BYTES)
        if record.problem or record.value["xxh3_128"] != _hash_of(record.value["files"]):
            raise DamagedEntryError(f"{MANIFEST} cannot be used ({record.problem or 'its own hash differs'})")
        self._files = {name: FileHashes(**hashes) for name, hashes in record.value["files"].items()}

    def path(self, name: str) -> Path:
        """Return the path of a file, after all of it was verified."""
        blocks = self.hashes(name).blocks
        with _open(self.folder / name) as file:
            for index in range(len(blocks)):
                self.check_block(name, index, file.read(BLOCK_BYTES))
        return self.folder / name

    def verify(self) -> None:
        """Verify all files."""
        for name in self._files:
            self.path(name)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return self.path(name).read_bytes()

    def hashes(self, name: str) -> FileHashes:
        """Return the hashes of a file, after only its size was verified."""
        hashes = self._files.get(name)
        if hashes is None:
            raise DamagedEntryError(f"{MANIFEST} does not list {name}")
        with _open(self.folder / name) as file:
            size = file.seek(0, io.SEEK_END)
        if size != hashes.size:
            raise DamagedEntryError(f"{name} has {size:,} bytes instead of {hashes.size:,}")
        return hashes

    def check_block(self, name: str, index: int, content: Any) -> None:
        """Check the content of one block, of BLOCK_BYTES or what is left for the last one."""
        blocks = self._files[name].blocks
        if xxhash.xxh3_128_hexdigest(content) != blocks[index]:
            raise DamagedEntryError(f"{name} differs from what was written (in block {index + 1} of {len(blocks)})")

    def condemn(self) -> None:
        """Let the next start build the entry again."""
        with suppress(OSError):
            (self.folder / MANIFEST).unlink()


def _hash_of(files: dict) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files).encode())


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file of an entry. An error is damage: the entry is built anew."""
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise DamagedEntryError(f"{path.name} cannot be read ({error.strerror or error})") from error
