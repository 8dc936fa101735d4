"""Copy of a run in an object store: checkpoints are committed locally, and a thread of rank 0 uploads them.

    URL/checkpoints/step_00000040/    the files of a committed checkpoint; its marker COMMITTED is written last
    URL/run.json, metrics.jsonl, ...  what else belongs to the run, see RECORDS

A store has no rename, so the marker decides: it is removed before any other object of its folder changes, and written
after all of them were verified. A folder without a marker does not count. `fetch_newest` verifies size and SHA-256 of
each file before a checkpoint appears in the local folder, and resuming verifies it again.

The protocol needs a store that shows a finished write to every later read and listing, as S3 does since 2020
(https://aws.amazon.com/s3/consistency) and Google Cloud Storage does.

tests/faults/test_mirror.py interrupts every request in every way.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    DamagedManifest,
    check_files,
    list_checkpoints,
    read_manifest,
    step_of,
)
from samecurve.errors import CheckpointError, StorageError
from samecurve.storage.atomic import storage_errors
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.object_store import ObjectStore, local_files

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

FOLDER = "checkpoints"
FETCHED = ".partial-"  # as commit.PARTIAL: the next save sweeps what a killed fetch left
SET_ASIDE = "COMMITTED.set_aside"
HISTORY = ("metrics.jsonl", "skipped.jsonl", "run.json")  # what a session elsewhere goes on with
RECORDS = (*HISTORY, "checkpoints/best.json", "tensorboard", "trackers", "profile", "model")


class Mirror:
    """Keeps a store up to date with a run directory. For rank 0.

    Args:
        run: the run directory.
        keep: checkpoint.keep; the store keeps as many, and those that are kept locally.
        log: prints one line.

    Attributes:
        uploading: the name of the checkpoint that is being read, which must not be rotated away; "" if none is.
    """

    def __init__(self, store: ObjectStore, run: Path, keep: int, log: Callable[[str], None]):
        self._store, self._run, self._keep, self._log = store, run, keep, log
        self._files = LocalFileSystem()
        self._wake, self._ending = threading.Event(), False
        self._thread: threading.Thread | None = None
        self.uploading = ""

    def start(self, step: int) -> None:
        """Set aside the store's checkpoints after `step`, which this session does not continue, and begin to upload."""
        for name in _committed(self._store):
            if step_of(Path(name)) > step:
                key = f"{FOLDER}/{name}"
                self._store.write(f"{key}/{SET_ASIDE}", self._store.read(f"{key}/{MARKER}") or b"")
                self._store.remove(f"{key}/{MARKER}")
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def offer(self) -> None:
        """Say that a checkpoint was committed."""
        self._wake.set()

    def finish(self) -> None:
        """Wait until the store has the run, its last checkpoint and its records.

        Raises:
            StorageError: something is missing in the store; the message lists it.
        """
        self._ending = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.catch_up()
        except (StorageError, OSError) as error:
            missing = ", ".join(self._missing_names()) or "records of the run"
            raise StorageError(
                f"{self._store.url} lacks {missing}: {error}; the local copy in {self._run} is whole, and the same "
                "command uploads the rest"
            ) from error

    def catch_up(self) -> None:
        """Upload what the store lacks, newest first, then the records; then remove what is no longer kept."""
        while (folder := self._next()) is not None:
            self.uploading = folder.name
            try:
                upload_checkpoint(self._store, folder)
            except FileNotFoundError:
                if folder.exists():
                    raise
            finally:
                self.uploading = ""
        self._upload_records()
        self._prune()

    def _work(self) -> None:
        while not self._ending:
            self._wake.wait()
            self._wake.clear()
            if self._ending:
                return
            try:
                self.catch_up()
            except (StorageError, OSError) as error:
                self._log(f"checkpoint.mirror: not uploaded yet: {error}; the next checkpoint tries again")

    def _next(self) -> Path | None:
        """Find the newest local checkpoint that the store lacks. Damaged ones are not uploaded."""
        for folder in list_checkpoints(self._files, self._run / FOLDER):
            is_there = self._store.read(f"{FOLDER}/{folder.name}/{MARKER}")
            with contextlib.suppress(FileNotFoundError):
                same = is_there == (folder / MARKER).read_bytes()
                if not same and not check_files(self._files, folder, small_only=True):
                    return folder
        return None

    def _missing_names(self) -> list[str]:
        try:
            there = _committed(self._store)
        except StorageError:
            there = []
        names = [folder.name for folder in list_checkpoints(self._files, self._run / FOLDER)]
        return [name for name in names if name not in there]

    def _upload_records(self) -> None:
        for path in local_files(self._run, RECORDS):
            if path.name.startswith("."):
                continue
            with contextlib.suppress(FileNotFoundError):  # moved aside by this run
                self._store.upload(path, path.relative_to(self._run).as_posix())

    def _prune(self) -> None:
        there = _committed(self._store)
        local = {folder.name for folder in list_checkpoints(self._files, self._run / FOLDER)}
        for name in there[self._keep :]:
            if name not in local:
                remove_checkpoint(self._store, name)


def upload_checkpoint(store: ObjectStore, folder: Path) -> None:
    """Upload a committed checkpoint. On return it is committed in the store; after a failure it does not count.

    Raises:
        StorageError: the store refuses, or holds something else than what was sent.
        OSError: a local file cannot be read.
    """
    key = f"{FOLDER}/{folder.name}"
    try:
        _, records = read_manifest(LocalFileSystem(), folder)
    except DamagedManifest as error:
        if not folder.exists():
            raise FileNotFoundError(str(folder)) from error
        raise StorageError(f"{folder}: {error.damage}; it was not uploaded") from error
    store.remove(f"{key}/{MARKER}")
    for name in (*(record.name for record in records), MANIFEST, MARKER):
        store.upload(folder / name, f"{key}/{name}")


def remove_checkpoint(store: ObjectStore, name: str) -> None:
    """Remove a checkpoint from the store, its marker first."""
    key = f"{FOLDER}/{name}"
    store.remove(f"{key}/{MARKER}")
    for file in store.folders(key):
        store.remove(f"{key}/{file}")


def fetch(recipe: Recipe, resume: str, fresh: bool) -> None:
    """Bring the run's newest checkpoint from checkpoint.mirror before the run directory is looked at. For rank 0.

    Raises:
        CheckpointError: `resume` is none and the store has checkpoints, or all of them are damaged.
        StorageError: the store does not answer. Starting over without it would hide a checkpoint.
    """
    url = recipe.checkpoint.mirror
    if url is None:
        return
    store = ObjectStore(url)
    if resume == "auto":
        fetch_newest(store, Path(recipe.output_dir), print)
    elif resume == "none" and not fresh and _committed(store):
        raise CheckpointError(
            f"checkpoint.mirror: {url} holds checkpoints of an earlier run, which --resume none would leave behind; "
            "resume from them (--resume auto), choose another URL, or add --fresh to set them aside"
        )


def fetch_newest(store: ObjectStore, run: Path, log: Callable[[str], None]) -> Path | None:
    """Fetch the store's newest good checkpoint if it is newer than every good local one. For rank 0.

    Returns:
        Its local folder; None if there was nothing newer.

    Raises:
        CheckpointError: neither the store nor the local folder has a good one, but the store has damaged ones.
        StorageError: the store does not answer.
    """
    files, directory = LocalFileSystem(), run / FOLDER
    good = [each for each in list_checkpoints(files, directory) if not check_files(files, each, small_only=True)]
    newest = step_of(good[0]) if good else -1
    rejected = []
    for name in _committed(store):
        if step_of(Path(name)) <= newest:
            break
        try:
            folder = _fetch(store, directory, name)
        except DamagedManifest as error:
            rejected.append(f"  {store.url}/{FOLDER}/{name}/{error.damage}")
            log(f"skipped an unusable checkpoint:\n{rejected[-1]}")
            continue
        _fetch_history(store, run)
        log(f"fetched {store.url}/{FOLDER}/{name}")
        return folder
    if rejected and not good:
        raise CheckpointError(
            f"no checkpoint in {store.url} can be used; choose another one, or start over (--fresh)\n"
            + "\n".join(rejected)
        )
    return None


def verify(store: ObjectStore, name: str, folder: Path) -> None:
    """Download one checkpoint into an empty folder and compare size and SHA-256 of every file.

    Raises:
        DamagedManifest: the first problem found.
    """
    for file in (MARKER, MANIFEST):
        content = store.read(f"{FOLDER}/{name}/{file}")
        if content is None:
            raise DamagedManifest(file, "a file", "no such object")
        (folder / file).write_bytes(content)
    _, records = read_manifest(LocalFileSystem(), folder)
    sizes = store.sizes(f"{FOLDER}/{name}")
    for record in records:
        found = sizes.get(record.name)
        if found != record.size:
            raise DamagedManifest(record.name, f"{record.size} bytes", "no such object" if found is None else found)
        store.download(f"{FOLDER}/{name}/{record.name}", folder / record.name, record.size)
    for damage in check_files(LocalFileSystem(), folder):
        raise DamagedManifest(*damage)


def _fetch(store: ObjectStore, directory: Path, name: str) -> Path:
    files, partial, final = LocalFileSystem(), directory / f"{FETCHED}{name}", directory / name
    with storage_errors(partial):
        directory.mkdir(exist_ok=True)
        if partial.exists():
            files.remove_folder(partial)
        partial.mkdir()
        verify(store, name, partial)
        for file in (MARKER, MANIFEST):
            with open(partial / file, "rb+") as opened:
                files.sync(opened)
        files.sync_folder(partial)
        if final.exists():  # damaged, or it would have been used
            files.rename(final, directory / f".deleted-{name}")
        files.rename(partial, final)
        files.sync_folder(directory)
    return final


def _fetch_history(store: ObjectStore, run: Path) -> None:
    """Fetch the records of the earlier session, unless this folder has some of its own."""
    if any((run / name).exists() for name in HISTORY):
        return
    for name in HISTORY:
        content = store.read(name)
        if content is not None:
            with storage_errors(run / name):
                (run / name).write_bytes(content)


def _committed(store: ObjectStore) -> list[str]:
    """List the names of the store's committed checkpoints, newest first."""
    names = [name for name in store.folders(FOLDER) if re.fullmatch("step_[0-9]{8,}", name)]
    marked = [name for name in names if MARKER in store.folders(f"{FOLDER}/{name}")]
    return sorted(marked, key=lambda name: int(name[5:]), reverse=True)
