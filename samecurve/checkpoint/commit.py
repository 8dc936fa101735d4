"""All of a checkpoint or nothing of it, whatever happens: a full disk, a killed rank, a power cut.

    step_00000040/              rank_00000.safetensors, ...    by every rank
                                state.json, index.json, ...    by rank 0
                                manifest.json                  name, size and sha256 of every file above
                                COMMITTED                      the manifest's sha256
    .partial-step_00000040/     while it is written
    .deleted-step_00000020/     while it is removed

A folder is named step_... only once all of it is durable: every file is synced, then the folder (which holds their
names), then comes the rename, then the sync of the parent folder, then commit returns. See "Ensuring data reaches
disk", https://lwn.net/Articles/457667. So a step_ folder that `verify.check` rejects was damaged afterwards.

tests/faults/test_commit_protocol.py interrupts every operation here in every way.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from samecurve.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    FileRecord,
    check_files,
    folder_name,
    list_checkpoints,
    manifest_digest,
)
from samecurve.errors import NumericError, StorageError
from samecurve.storage.atomic import storage_errors
from samecurve.storage.fault_injection import fault_point
from samecurve.storage.filesystem import PIECE_BYTES, FileSystem

__all__ = ["FileRecord", "check_files", "commit", "list_checkpoints", "manifest_digest", "rotate", "write_file"]

PARTIAL, DELETED = ".partial-", ".deleted-"
SPARE_BYTES = 16 << 20  # for the small files, the files' headers and the file system's own blocks

T = TypeVar("T")
Exchange = Callable[[Any], list]  # every rank's value, in rank order; a barrier too


# Writing


def commit(
    fs: FileSystem,
    directory: Path,
    step: int,
    planned_bytes: int,
    write: Callable[[Path], tuple[list[FileRecord], Any]],
    small_files: Callable[[list], dict[str, bytes]],
    exchange: Exchange,
    rank: int,
) -> None:
    """Write the checkpoint of `step` into `directory`, all ranks together; when it returns, it survives a power cut.

    write: writes this rank's files into a folder, with `write_file`; also returns a note, any JSON value.
    small_files: from all ranks' notes to what rank 0 adds.
    Raises StorageError with the same text on all ranks when anything failed on any, NumericError when `write` said so
    on any; what `exchange` raises when a rank is gone is passed on. After a failure the folder is either not there or,
    when only the last sync failed, complete.
    """
    partial = directory / f"{PARTIAL}{folder_name(step)}"
    try:
        planned = _together(exchange, lambda: _plan(directory, planned_bytes))
        _together(exchange, lambda: _prepare(fs, partial, sum(planned)) if rank == 0 else None)
        wrote = _together(exchange, lambda: _write(fs, partial, write))
        _together(exchange, lambda: _finish(fs, partial, step, wrote, small_files) if rank == 0 else None)
    except (StorageError, NumericError):
        if rank == 0:
            _sweep(fs, directory)
        raise


def write_file(fs: FileSystem, path: Path, chunks: Iterable[Any]) -> FileRecord:
    """Write and sync one file. chunks: bytes-like objects, each used only until the next one is asked for.

    A second thread hashes the piece that is being written: hashlib and the system calls release the GIL. Syncing piece
    by piece keeps the disk busy meanwhile; with one sync at the end, the hash's time would be added to the disk's.
    """
    digest, size, unsynced = hashlib.sha256(), 0, 0
    with storage_errors(path), fs.create(path) as file, ThreadPoolExecutor(1) as hasher:
        for number, piece in enumerate(_pieces(chunks)):
            if number == 1:
                fault_point("save.write")
            hashed = hasher.submit(digest.update, piece)
            file.write(piece)
            size, unsynced = size + len(piece), unsynced + len(piece)
            if unsynced >= PIECE_BYTES:
                fs.sync(file)
                unsynced = 0
            hashed.result()
        fault_point("save.fsync")
        fs.sync(file)
    return FileRecord(path.name, size, digest.hexdigest())


def _pieces(chunks: Iterable[Any]) -> Iterator[memoryview | bytes]:
    for chunk in chunks:
        view = memoryview(chunk)
        view = view.cast("B") if view.nbytes else b""  # an empty view cannot be cast
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _together(exchange: Exchange, work: Callable[[], T]) -> list[T]:
    """Do this rank's work and learn every rank's result. When it failed anywhere, all ranks raise the same class."""
    result, failure, error = None, "", None
    try:
        result = work()
    except Exception as caught:  # a bug too: the others wait in `exchange` and have to learn of it
        error = caught
        is_known = isinstance(error, (StorageError, NumericError))
        failure = str(error) if is_known else f"{type(error).__name__}: {error}"
        if not is_known and not isinstance(error, OSError):
            traceback.print_exception(error)  # of what is raised below only the message is
    outcomes = exchange((result, failure, isinstance(error, NumericError)))
    failures = [f"rank {rank}: {failure}" for rank, (_, failure, _) in enumerate(outcomes) if failure]
    if failures:
        kind = NumericError if any(numeric for *_, numeric in outcomes) else StorageError
        raise kind("; ".join(failures)) from error
    return [result for result, *_ in outcomes]


def _plan(directory: Path, planned_bytes: int) -> int:
    with storage_errors(directory):
        fault_point("save.prepare")
    return planned_bytes


def _prepare(fs: FileSystem, partial: Path, planned_bytes: int) -> None:
    directory = partial.parent
    with storage_errors(directory):
        if not fs.exists(directory):
            fs.make_folder(directory)
        # Also when it was there: a session that was killed may have made it and not synced it.
        fs.sync_folder(directory.parent)
        _sweep(fs, directory)
        needed, free = planned_bytes + SPARE_BYTES, fs.free_bytes(directory)
        if free < needed:
            raise StorageError(
                f"{directory}: the next checkpoint needs {needed} bytes and {free} are free; free some, or lower "
                "checkpoint.keep"
            )
        fs.make_folder(partial)


def _write(fs: FileSystem, partial: Path, write: Callable) -> tuple[list[FileRecord], Any]:
    with storage_errors(partial):
        if not fs.exists(partial):
            raise StorageError(
                f"{partial}: rank 0 made this folder and this rank does not see it; output_dir has to be the same "
                "folder on all machines"
            )
        wrote = write(partial)
        fault_point("save.agree")
        return wrote


def _finish(fs: FileSystem, partial: Path, step: int, wrote: list, small_files: Callable) -> None:
    """Rank 0, when all ranks' files are durable."""
    with storage_errors(partial):
        records = [record for records, _ in wrote for record in records]
        for record in records:
            _check_visible(fs, partial, record)
        contents = small_files([note for _, note in wrote])
        records += [_write_small(fs, partial / name, content) for name, content in contents.items()]
        assert len({record.name for record in records}) == len(records), f"two files of one name: {records}"
        fault_point("save.manifest")
        files = [record._asdict() for record in records]
        manifest = json.dumps({"step": step, "world_size": len(wrote), "files": files}, indent=1).encode()
        digest = _write_small(fs, partial / MANIFEST, manifest).sha256
        _write_marker(fs, partial, digest)
        fs.sync_folder(partial)
        _publish(fs, partial, partial.with_name(folder_name(step)))


def _check_visible(fs: FileSystem, partial: Path, record: FileRecord) -> None:
    path = partial / record.name
    try:
        seen = f"{fs.size(path)} bytes"
    except FileNotFoundError:
        seen = "no such file"
    if seen != f"{record.size} bytes":
        raise StorageError(
            f"{path}: {record.size} bytes were written and rank 0 sees {seen}; output_dir has to be the same folder on "
            "all machines"
        )


def _write_marker(fs: FileSystem, folder: Path, digest: str) -> None:
    fault_point("save.marker")
    _write_small(fs, folder / MARKER, json.dumps({"manifest_sha256": digest}).encode())


def _publish(fs: FileSystem, partial: Path, final: Path) -> None:
    fault_point("save.rename")
    if fs.exists(final):  # damaged and therefore not gone on from, or left by a save whose last sync failed
        fs.rename(final, final.with_name(f"{DELETED}{final.name}"))
    fs.rename(partial, final)
    fault_point("save.renamed")
    fs.sync_folder(final.parent)


def _write_small(fs: FileSystem, path: Path, content: bytes) -> FileRecord:
    with storage_errors(path), fs.create(path) as file:
        file.write(content)
        fs.sync(file)
    return FileRecord(path.name, len(content), hashlib.sha256(content).hexdigest())


# Removing


def rotate(fs: FileSystem, directory: Path, keep: int, protected: Collection[str]) -> str:
    """Remove all but the newest `keep` good checkpoints and those named in `protected`. For rank 0, after a commit.

    Returns what went wrong, "" when nothing did: the next rotation tries again. Damaged checkpoints do not count as
    good ones. They show what happened to the disk, and parts of them may be all that is left, so the newest `keep` of
    them stay too; more would fill a disk that damages each one. Good means here: all files are there in their sizes.
    """
    try:
        good, damaged = [], []
        for folder in list_checkpoints(fs, directory):
            (damaged if check_files(fs, folder, shard=None) else good).append(folder)
        keep = max(keep, 1)
        for folder in (*good[keep:], *damaged[keep:]):
            if folder.name not in protected:
                fault_point("save.rotate")
                fs.rename(folder, directory / f"{DELETED}{folder.name}")
    except OSError as error:
        return str(error)
    return _sweep(fs, directory)


def _sweep(fs: FileSystem, directory: Path) -> str:
    """Remove what is half written and what was moved aside. Returns what went wrong.

    That is no failure of a save: on NFS a folder cannot be removed while a file in it is open somewhere.
    """
    problems = []
    try:
        debris = [name for name in fs.folders(directory) if name.startswith((PARTIAL, DELETED))]
        if debris:
            fs.sync_folder(directory)  # else a power cut could bring back the name step_... of a folder half removed
    except OSError as error:
        return str(error)
    for name in debris:
        try:
            fs.remove_folder(directory / name)
        except OSError as error:
            problems.append(str(error))
    return "; ".join(problems)
