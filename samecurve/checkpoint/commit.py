"""Atomic commit and rotation of checkpoints: all or nothing, despite a full disk, a killed rank or a power cut.

    step_00000040/              rank_00000.safetensors, ...    written by every rank
                                state.json, index.json, ...    written by rank 0
                                manifest.json                  name, size and sha256 of every file above
                                COMMITTED                      the manifest's sha256
    .partial-step_00000040/     the checkpoint while it is being written
    .deleted-step_00000020/     the checkpoint while it is being removed

A folder gets its step_... name only once all of its content is durable. The order is: sync every file, sync the folder
(which holds the file names), rename it, sync the parent folder, return from `commit`. See "Ensuring data reaches disk",
https://lwn.net/Articles/457667. A step_ folder that `manifest.check_files` rejects was therefore damaged afterwards.

tests/faults/test_commit_protocol.py interrupts every operation of this module in every way.
"""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from samecurve.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    STEPS,
    FileRecord,
    check_files,
    folder_name,
    list_checkpoints,
)
from samecurve.errors import NumericError, StorageError
from samecurve.storage.atomic import storage_errors
from samecurve.storage.fault_points import fault_point
from samecurve.storage.filesystem import PIECE_BYTES, FileSystem

PARTIAL, DELETED = ".partial-", ".deleted-"
SPARE_BYTES = 16 << 20  # for the small files, the file headers and the file system's own blocks

T = TypeVar("T")


class Conclude(Protocol):
    """`ControlGroup.conclude`: rank 0 draws a conclusion from one value per rank, which all ranks get."""

    def __call__(self, value: Any, conclusion: Callable[[list], T], /) -> T: ...


@dataclass(frozen=True)
class Content:
    """This rank's part of the checkpoint of one step.

    Attributes:
        num_bytes: size of this rank's files; rank 0 compares the sum over all ranks with the free space.
        write: writes this rank's files into a folder with `write_file`. Returns their records and a note, which may
            be any JSON value.
        small_files: maps the notes of all ranks to the files (name: content) that rank 0 adds.
        name: of the folder; "" for the step's.
        names: regular expression of the names of `directory`'s checkpoints, also of those that were never finished.
    """

    step: int
    num_bytes: int
    write: Callable[[Path], tuple[list[FileRecord], Any]]
    small_files: Callable[[list], dict[str, bytes]]
    name: str = ""
    names: str = STEPS

    @property
    def folder(self) -> str:
        return self.name or folder_name(self.step)


def commit(fs: FileSystem, directory: Path, content: Content, conclude: Conclude, rank: int) -> None:
    """Write a checkpoint into `directory`. Collective; on return the checkpoint survives a power cut.

    Each rank sends its records and its note to rank 0 only.

    After a failure the folder does not exist or, if only the last sync failed, is complete.

    Args:
        directory: the folder of all checkpoints; created if missing.
        conclude: of a control group. An exception that it raises when a rank is gone is passed on.

    Raises:
        StorageError: any rank failed; the text is the same on all ranks.
        NumericError: `write` raised it on any rank; the text is the same on all ranks.
    """
    partial = directory / f"{PARTIAL}{content.folder}"
    try:
        planned = _attempt(lambda: _plan(directory, content.num_bytes))
        _together(conclude, planned, lambda planned: _prepare(fs, partial, sum(planned), content.names))
        wrote = _attempt(lambda: _write(fs, partial, content))
        _together(conclude, wrote, lambda wrote: _finish(fs, partial, content, wrote))
    except (StorageError, NumericError):
        if rank == 0:
            sweep(fs, directory, content.names)
        raise


def write_file(fs: FileSystem, path: Path, chunks: Iterable[Any]) -> FileRecord:
    """Write and sync one file.

    A second thread hashes the piece that is being written: hashlib and the system calls release the GIL. Syncing piece
    by piece keeps the disk busy meanwhile. With a single sync at the end, hashing time would add to disk time.

    Args:
        chunks: bytes-like objects. Each one is used only until the next one is requested.
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


class _Outcome(NamedTuple):
    """Result of one rank's work. failure: "" if it succeeded. error: known on that rank only."""

    result: Any
    failure: str = ""
    is_numeric: bool = False
    error: Exception | None = None


def _attempt(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(work())
    except Exception as error:  # bugs too: the other ranks wait in `conclude` and must receive the failure
        is_known = isinstance(error, (StorageError, NumericError))
        failure = str(error) if is_known else f"{type(error).__name__}: {error}"
        if not is_known and not isinstance(error, OSError):
            traceback.print_exception(error)  # the exception that _together raises keeps only the message
        return _Outcome(None, failure, isinstance(error, NumericError), error)


def _together(conclude: Conclude, own: _Outcome, work: Callable[[list], Any]) -> None:
    """Do `work` on rank 0 with the results of all ranks. A failure on any rank raises the same class on all ranks."""

    def attempt(outcomes: list[_Outcome]) -> _Outcome:
        if not any(outcome.failure for outcome in outcomes):
            outcomes = [_attempt(lambda: work([outcome.result for outcome in outcomes]))]
        failures = [f"rank {rank}: {outcome.failure}" for rank, outcome in enumerate(outcomes) if outcome.failure]
        return _Outcome(None, "; ".join(failures), any(outcome.is_numeric for outcome in outcomes))

    concluded = conclude(own._replace(error=None), attempt)
    if concluded.failure:
        raise (NumericError if concluded.is_numeric else StorageError)(concluded.failure) from own.error


def _plan(directory: Path, planned_bytes: int) -> int:
    with storage_errors(directory):
        fault_point("save.prepare")
    return planned_bytes


def _prepare(fs: FileSystem, partial: Path, planned_bytes: int, names: str) -> None:
    directory = partial.parent
    with storage_errors(directory):
        if not fs.exists(directory):
            fs.make_folder(directory)
        # Sync an existing folder too: a killed session may have created it without syncing it.
        fs.sync_folder(directory.parent)
        sweep(fs, directory, names)
        needed, free = planned_bytes + SPARE_BYTES, fs.free_bytes(directory)
        if free < needed:
            raise StorageError(
                f"{directory}: the next checkpoint needs {needed / 1e9:,.3f} GB, but {free / 1e9:,.3f} GB are free; "
                "free some space, or lower checkpoint.keep"
            )
        fs.make_folder(partial)


def _write(fs: FileSystem, partial: Path, content: Content) -> tuple[list[FileRecord], Any]:
    with storage_errors(partial):
        if not fs.exists(partial):
            raise StorageError(
                f"{partial}: rank 0 made this folder and this rank does not see it; output_dir has to be the same "
                "folder on all machines"
            )
        wrote = content.write(partial)
        fault_point("save.agree")
        return wrote


def _finish(fs: FileSystem, partial: Path, content: Content, wrote: list) -> None:
    """Write manifest and marker and rename the folder. For rank 0, once the files of all ranks are durable."""
    with storage_errors(partial):
        records = [record for records, _ in wrote for record in records]
        for record in records:
            path = partial / record.name
            try:
                seen = f"{fs.size(path)} bytes"
            except FileNotFoundError:
                seen = "no such file"
            if seen != f"{record.size} bytes":
                raise StorageError(
                    f"{path}: {record.size} bytes were written and rank 0 sees {seen}; output_dir has to be the same "
                    "folder on all machines"
                )
        small_files = content.small_files([note for _, note in wrote])
        records += [_write_small(fs, partial / name, data) for name, data in small_files.items()]
        assert len({record.name for record in records}) == len(records), f"two files of one name: {records}"
        fault_point("save.manifest")
        files = [record._asdict() for record in records]
        manifest = json.dumps({"step": content.step, "world_size": len(wrote), "files": files}, indent=1).encode()
        digest = _write_small(fs, partial / MANIFEST, manifest).sha256
        _write_marker(fs, partial, digest)
        fs.sync_folder(partial)
        _publish(fs, partial, partial.with_name(content.folder))


def _write_marker(fs: FileSystem, folder: Path, digest: str) -> None:
    fault_point("save.marker")
    _write_small(fs, folder / MARKER, json.dumps({"manifest_sha256": digest}).encode())


def _publish(fs: FileSystem, partial: Path, final: Path) -> None:
    fault_point("save.rename")
    if fs.exists(final):  # damaged, so the run did not resume from it, or left by a save whose last sync failed
        fs.rename(final, final.with_name(f"{DELETED}{final.name}"))
    fs.rename(partial, final)
    fault_point("save.renamed")
    fs.sync_folder(final.parent)


def _write_small(fs: FileSystem, path: Path, content: bytes) -> FileRecord:
    with storage_errors(path), fs.create(path) as file:
        file.write(content)
        fs.sync(file)
    return FileRecord(path.name, len(content), hashlib.sha256(content).hexdigest())


def rotate(fs: FileSystem, directory: Path, keep: int, protected: Collection[str], names: str = STEPS) -> str:
    """Remove all but the newest `keep` good checkpoints and those named in `protected`. For rank 0, after a commit.

    A checkpoint is good here if all of its files exist and have the recorded sizes.

    Damaged checkpoints are counted separately and the newest `keep` of them stay too. They show what happened to the
    disk, and parts of them may be all that is left. Keeping more would fill a disk that damages every checkpoint.

    Args:
        directory: the folder of all checkpoints.
        keep: number to keep of each kind; less than 1 counts as 1.
        protected: names of checkpoints' folders.
        names: see Content.

    Returns:
        The problems found, "" if there were none. The next rotation tries again.
    """
    try:
        good, damaged = [], []
        for folder in list_checkpoints(fs, directory, names):
            (damaged if check_files(fs, folder, small_only=True) else good).append(folder)
        keep = max(keep, 1)
        for folder in (*good[keep:], *damaged[keep:]):
            if folder.name not in protected:
                fault_point("save.rotate")
                fs.rename(folder, directory / f"{DELETED}{folder.name}")
    except OSError as error:
        return str(error)
    return sweep(fs, directory, names)


def recover(fs: FileSystem, final: Path) -> None:
    """Finish a save that was killed between the two renames by which it replaces the checkpoint `final`. For rank 0."""
    for prefix in (PARTIAL, DELETED):
        folder = final.with_name(f"{prefix}{final.name}")
        if not fs.exists(final) and fs.exists(folder) and not check_files(fs, folder, small_only=True):
            fs.rename(folder, final)


def finish_replacements(fs: FileSystem, directory: Path) -> None:
    """Recover the checkpoints of train.py whose replacement was killed between its two renames. For rank 0."""
    if fs.exists(directory):
        for folder in directory.glob(f"{PARTIAL}*"):
            final = folder.with_name(folder.name.removeprefix(PARTIAL))
            if fs.exists(final.with_name(f"{DELETED}{final.name}")):
                recover(fs, final)


def sweep(fs: FileSystem, directory: Path, names: str = STEPS) -> str:
    """Remove partial and deleted checkpoint folders. Returns the problems found, "" if there were none.

    A problem does not fail the save: on NFS, a folder cannot be removed while a file in it is open on some host.
    """
    problems = []
    try:
        left = f"({re.escape(PARTIAL)}|{re.escape(DELETED)})({names})"
        debris = [name for name in fs.folders(directory) if re.fullmatch(left, name)]
        if debris:
            fs.sync_folder(directory)  # otherwise a power cut could restore the step_... name of a half-removed folder
    except OSError as error:
        return str(error)
    for name in debris:
        try:
            fs.remove_folder(directory / name)
        except OSError as error:
            problems.append(str(error))
    return "; ".join(problems)
