"""Copy of a run in an object store: checkpoints are committed locally, and a thread of rank 0 uploads them.

    URL/checkpoints/step_00000040/    the files of a committed checkpoint; its marker COMMITTED is written last
    URL/run.json, metrics.jsonl, ...  what else belongs to the run, see RECORDS
    URL/owner.json                    the run and the session that upload there, see fetch.take_over

A store has no rename, so the marker decides: it is removed before any other object of its folder changes, and written
after all of them were verified. A folder without a marker does not count. fetch.py verifies size and SHA-256 of each
file before a checkpoint appears in the local folder, and resuming verifies it again.

Two sessions of one run may be alive: a copy of the directory, or a host that was given up and comes back. The one that
started last is the owner. The other one looks before it changes a checkpoint in the store, says so, uploads no more and
trains on: what it has is complete in its own directory, and its end is an error that lists what the store lacks.

The protocol needs a store that shows a finished write to every later read and listing, as S3 does since 2020
(https://aws.amazon.com/s3/consistency) and Google Cloud Storage does.

tests/faults/test_mirror.py interrupts every request in every way.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from samecurve.checkpoint.fetch import (
    FOLDER,
    HISTORY,
    LIVE_SECONDS,
    MODEL,
    OWN_NAME,
    OWNER,
    best_name,
    committed,
    read_owner,
    read_sessions,
    step_names,
)
from samecurve.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    DamagedManifest,
    check_files,
    list_checkpoints,
    read_manifest,
    step_of,
)
from samecurve.errors import StorageError
from samecurve.storage.atomic import storage_errors, write_bytes
from samecurve.storage.ending import at_end
from samecurve.storage.filesystem import LocalFileSystem, leads_out
from samecurve.storage.object_store import ObjectStore

SIGN_SECONDS = LIVE_SECONDS / 3
SET_ASIDE = "COMMITTED.set_aside"
LOST = "this one uploads no more, and keeps its checkpoints locally"
RECORDS = (*HISTORY, "checkpoints/best.json", "tensorboard", "trackers", "profile", MODEL)


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
        self._owner_thread: threading.Thread | None = None
        self._owner, self._session = "", uuid.uuid4().hex
        self._is_lost = False
        self._closed = threading.Event()
        self._is_signed = False
        self._uploaded: dict[str, tuple[int, int]] = {}  # size and time of the records as they were sent
        self._left_out: set[Path] = set()
        self.uploading = ""

    def start(self, step: int, fresh: bool = False) -> None:
        """Set aside the store's checkpoints after `step`, which this session does not continue, and begin to upload.

        Args:
            fresh: begin another run, which a copy of this directory does not continue.

        Raises:
            StorageError: the store does not answer, or the run directory cannot be written.
        """
        own = self._run / OWN_NAME
        with storage_errors(own):
            name, *sessions = read_sessions(own)
            self._owner = uuid.uuid4().hex if fresh or not name else name
            sessions.append(self._session)
            # before the store has it: a session that is killed in between must not take itself for another one
            write_bytes(own, ["\n".join((name or self._owner, *sessions)).encode()])
            self._sign(live=True)
            self._is_signed = True
            at_end(self.sign_off)
            # after it: a fresh start that the store refuses must not cost the run here its claim
            write_bytes(own, ["\n".join((self._owner, *sessions)).encode()])
        for name in committed(self._store):
            if step_of(Path(name)) > step:
                key = f"{FOLDER}/{name}"
                # in this order, or a kill in between would leave neither marker, and `catch_up` would remove the rest
                self._store.write(f"{key}/{SET_ASIDE}", self._store.read(f"{key}/{MARKER}") or b"")
                self._store.remove(f"{key}/{MARKER}")
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()
        self._owner_thread = threading.Thread(target=self._stay, name="mirror owner", daemon=True)
        self._owner_thread.start()

    def _sign(self, live: bool) -> None:
        sign = {"run": self._owner, "session": self._session, "host": socket.gethostname()}
        self._store.write(OWNER, json.dumps(sign | {"time": time.time(), "live": live}).encode())

    def _stay(self) -> None:
        """Say from time to time that this session is alive, unless another one has taken its place."""
        while not self._closed.wait(SIGN_SECONDS):
            try:
                self._check_owner()
                if not self._closed.is_set():
                    self._sign(live=True)
            except StorageError:  # or the next time
                if self._is_lost:
                    return

    def sign_off(self) -> None:
        """Say that this session has ended, unless another one has taken its place.

        Raises:
            StorageError: the store does not answer, or is another session's.
        """
        self._closed.set()
        if self._owner_thread is not None:  # which may be about to say that this session is alive
            self._owner_thread.join()
        if self._is_signed:
            self._check_owner()
            self._sign(live=False)
            self._is_signed = False

    def _check_owner(self) -> None:
        """Raise StorageError if another session uploads to the same URL, now or earlier."""
        owner = read_owner(self._store) if self._owner and not self._is_lost else {}
        if owner.get("session", self._session) != self._session:
            self._is_lost = True
            self._log(f"checkpoint.mirror: a run on {owner['host']} uploads to {self._store.url}; {LOST}")
        if self._is_lost:
            raise StorageError(f"another run uploads there; {LOST}")

    def offer(self) -> None:
        """Say that a checkpoint was committed."""
        self._wake.set()

    def finish(self, busy: Callable[[], None] = lambda: None) -> None:
        """Wait until the store has the run, its last checkpoint and its records.

        Args:
            busy: reports progress to the watchdog; not called before, because it would hide that training hangs.

        Raises:
            StorageError: something is missing in the store; the message lists it.
        """
        self._ending, self._store.busy = True, busy
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._closed.set()
        try:
            self.catch_up()
            self.sign_off()
        except (StorageError, OSError) as error:
            there = []
            with contextlib.suppress(StorageError):
                there = committed(self._store)
            local = [folder.name for folder in list_checkpoints(self._files, self._run / FOLDER)]
            missing = ", ".join(name for name in local if name not in there) or "records of the run"
            raise StorageError(
                f"{self._store.url} lacks {missing}: {error}; the local copy in {self._run} is complete; run the "
                "same command again to upload the rest"
            ) from error

    def catch_up(self) -> None:
        """Upload what the store lacks, newest first, and the records; then remove what is no longer kept."""
        self._check_owner()
        while (folder := self._next()) is not None:
            # first, so that a session elsewhere finds the records of all steps before the checkpoint
            self._upload_records(HISTORY)
            self.uploading = folder.name
            try:
                upload_checkpoint(self._store, folder, self._check_owner)
            except FileNotFoundError:  # rotated away before `uploading` protected it
                if folder.exists():
                    raise
            finally:
                self.uploading = ""
        self._check_owner()
        best = best_name(self._store)  # of an earlier session elsewhere, before this one's own replaces it
        self._upload_records(RECORDS)
        if model := {path.name for path in self._files_of((MODEL,)) if path.parent == self._run / MODEL}:
            for name in self._store.sizes(MODEL).keys() - model:  # of an earlier model, which was in other files
                self._store.remove(f"{MODEL}/{name}")
        kept = {best} | {folder.name for folder in list_checkpoints(self._files, self._run / FOLDER)}
        kept |= set(committed(self._store)[: self._keep])
        for name in set(step_names(self._store)) - kept:
            if SET_ASIDE not in self._store.folders(f"{FOLDER}/{name}"):
                remove_checkpoint(self._store, name)
        with contextlib.suppress(StorageError):  # no permission to list them: a lifecycle rule of the bucket does it
            self._store.abort_uploads()

    def _work(self) -> None:
        while not self._ending:
            self._wake.wait()
            self._wake.clear()  # before the upload, so that an offer during it counts
            if self._ending:
                return
            try:
                self.catch_up()
            except (StorageError, OSError) as error:
                if self._is_lost:
                    return
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

    def _files_of(self, names: Iterable[str]) -> Iterator[Path]:
        """List the run's files of these names, and all files in the folders among them.

        What a link out of the run leads to is not the run's. Only checkpoints/ may lie elsewhere.
        """
        for top in (self._run / name for name in names):
            if self._is_inside(top, top.parent):
                files = sorted(top.rglob("*")) if top.is_dir() else [top]
                yield from (path for path in files if self._is_inside(path, top.parent) and path.is_file())

    def _is_inside(self, path: Path, folder: Path) -> bool:
        """Whether a path is in a folder, and not a link out of it, which is said once."""
        is_out = leads_out(path, folder)
        if is_out and path not in self._left_out:
            self._left_out.add(path)
            target = os.path.realpath(path)
            self._log(f"checkpoint.mirror: {path} is not uploaded: a link to {target}, which is outside of {folder}")
        return not is_out

    def _upload_records(self, names: Sequence[str]) -> None:
        for path in self._files_of(names):
            if path.name.startswith("."):
                continue
            key = path.relative_to(self._run).as_posix()
            with contextlib.suppress(FileNotFoundError):  # moved aside by this run
                # before the upload, so that what is added meanwhile is sent next time
                state = (path.stat().st_size, path.stat().st_mtime_ns)
                if self._uploaded.get(key) != state:
                    self._store.upload(path, key)
                    self._uploaded[key] = state


def upload_checkpoint(store: ObjectStore, folder: Path, check: Callable[[], None] = lambda: None) -> None:
    """Upload a committed checkpoint. On return it is committed in the store; after a failure it does not count.

    Args:
        check: called before the marker is removed and before it is written.

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
    check()
    store.remove(f"{key}/{MARKER}")
    store.remove(f"{key}/{SET_ASIDE}")  # of a session that this one did not continue: it is replaced now
    for name in (*(record.name for record in records), MANIFEST):
        store.upload(folder / name, f"{key}/{name}")
    check()
    store.upload(folder / MARKER, f"{key}/{MARKER}")


def remove_checkpoint(store: ObjectStore, name: str) -> None:
    """Remove a checkpoint from the store, its marker first."""
    key = f"{FOLDER}/{name}"
    store.remove(f"{key}/{MARKER}")
    for file in store.folders(key):
        store.remove(f"{key}/{file}")
