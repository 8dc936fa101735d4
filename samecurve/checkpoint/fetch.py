"""Reading of checkpoints from the store that a mirror fills, see checkpoint.mirror."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.checkpoint.commit import DELETED, PARTIAL
from samecurve.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    DamagedManifest,
    check_files,
    list_checkpoints,
    read_manifest,
    step_of,
)
from samecurve.errors import CheckpointError, ConfigurationError
from samecurve.specs.trackers import RUN_IDS
from samecurve.storage.atomic import storage_errors, write_bytes
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.jsonl import last_record
from samecurve.storage.object_store import ObjectStore
from samecurve.storage.records import parse
from samecurve.strategy.launchers import is_restart

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

FOLDER, MODEL = "checkpoints", "model"
OWNER, OWN_NAME = "owner.json", ".mirror_owner"
LIVE_SECONDS, POLL_SECONDS = 180.0, 5.0  # three of the owner's signs of life; hosts' clocks differ by less
# Records that a session on another machine continues. The last one shows whether they have been fetched already, see
# `_fetch_history`.
HISTORY = ("run.json", "skipped.jsonl", "metrics.jsonl")


def fetch(recipe: Recipe, resume: str, fresh: bool) -> None:
    """Bring the run's newest checkpoint from checkpoint.mirror before the run directory is looked at. For rank 0.

    Raises:
        ConfigurationError: the store belongs to another run, see `take_over`.
        CheckpointError: `resume` is none and the store has checkpoints, or all of them are damaged.
        StorageError: the store does not answer. Starting over without it would hide a checkpoint.
    """
    url = recipe.checkpoint.mirror
    if url is None:
        return
    store, run = ObjectStore(url), Path(recipe.output_dir)
    take_over(store, run, fresh, resume, time.monotonic() + LIVE_SECONDS if is_restart(os.environ) else 0)
    if resume == "auto":
        fetch_newest(store, run, print)
        if recipe.checkpoint.best is not None:
            fetch_best(store, run, print)
    elif resume == "none" and not fresh and committed(store):
        raise CheckpointError(
            f"checkpoint.mirror: {url} holds checkpoints of an earlier run, which --resume none would leave behind; "
            "resume from them (--resume auto), choose another URL, or add --fresh to set them aside"
        )


def take_over(store: ObjectStore, run: Path, fresh: bool, resume: str = "auto", deadline: float = 0) -> None:
    """Check that no other run owns the store, and become the owner's run where its checkpoints are resumed from.

    The store's object OWNER says which run uploads there, and which of its sessions. A file in the run directory has
    the same run in its first line, then the directory's sessions. All but this one have ended, as this one has the
    lock. A session of the run elsewhere, in a copy of the directory or on another host, may be alive.

    Args:
        fresh: whether the store's checkpoints are set aside, by another run than the owner's, see `Mirror.start`.
        resume: only "auto" makes a new directory the owner's run, because it alone resumes from the store.
        deadline: until when to wait for the end of a session that is alive, in time.monotonic() seconds.

    Raises:
        ConfigurationError: a session of another directory is alive there, or this run directory does not continue the
            store's run, or it would start over where the model of another directory is.
    """
    own = run / OWN_NAME
    name, *sessions = read_sessions(own)
    is_waiting = False
    while (owner := read_owner(store)) and owner["session"] not in sessions and is_live(owner):
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConfigurationError(
                f"checkpoint.mirror: {'this' if owner['run'] == name else 'a'} run on {owner['host']} uploads to "
                f"{store.url}; choose another URL, or end it there (one whose host "
                f"was lost counts for {LIVE_SECONDS:.0f} s)"
            )
        if not is_waiting:
            latest = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
            print(
                f"checkpoint.mirror: a session on {owner['host']} uploads to {store.url}; waiting until it ends there "
                f"or counts as lost, {LIVE_SECONDS:.0f} s after its last sign of life, at the latest until {latest}",
                flush=True,
            )
            is_waiting = True
        time.sleep(POLL_SECONDS)
    if fresh and owner and owner["session"] not in sessions and store.folders(MODEL):
        raise ConfigurationError(
            f"checkpoint.mirror: {store.url} has the trained model of a run on {owner['host']}, which a new run would "
            "replace; choose another URL"
        )
    # the last session is the owner under another name if `Mirror.start` with fresh was killed
    if not fresh and owner and owner["run"] != name and [owner["session"]] != sessions[-1:]:
        text = f"checkpoint.mirror: {store.url} belongs to another run, the last time on {owner['host']}"
        if name or list_checkpoints(LocalFileSystem(), run / FOLDER):
            raise ConfigurationError(
                f"{text}, and {run} has checkpoints of its own; choose another URL, or add --fresh to set both aside"
            )
        if resume != "auto":
            raise ConfigurationError(
                f"{text}, which --resume {resume} does not continue; choose another URL, or continue it (--resume auto)"
            )
        write_bytes(own, [owner["run"].encode()])


def read_sessions(own: Path) -> list[str]:
    """Read a run directory's OWN_NAME: the run, "" if it never uploaded, and its sessions."""
    text = own.read_text(encoding="utf-8", errors="replace") if own.is_file() else ""
    return text.split("\n")


def read_owner(store: ObjectStore) -> dict:
    """Read who uploads to the store: run, session, host, time (seconds since 1970) and live; {} if nobody does."""
    schema = {"run": str, "session": str, "host": str, "time": float, "live": bool}
    return parse(store.read(OWNER) or b"", schema)[0] or {}


def is_live(owner: dict) -> bool:
    return owner["live"] and time.time() - owner["time"] < LIVE_SECONDS


def fetch_newest(store: ObjectStore, run: Path, log: Callable[[str], None]) -> Path | None:
    """Fetch the store's newest good checkpoint if it is newer than every good local one. For rank 0.

    Returns:
        Its local folder; None if there was nothing newer.

    Raises:
        CheckpointError: neither the store nor the local folder has a good one, but the store has damaged ones.
        StorageError: the store does not answer.
    """
    files, directory = LocalFileSystem(), run / FOLDER
    # hashed in full, because the store may have what is damaged here
    good = next((path for path in list_checkpoints(files, directory) if not check_files(files, path)), None)
    newest = step_of(good) if good else -1
    rejected = []
    for name in committed(store):
        if step_of(Path(name)) <= newest:
            break
        # before the checkpoint: once that is here, the next start fetches nothing any more
        _fetch_history(store, run, step_of(Path(name)))
        try:
            folder = _fetch(store, directory, name)
        except DamagedManifest as error:
            rejected.append(f"  {store.url}/{FOLDER}/{name}/{error.damage}")
            log(f"skipped an unusable checkpoint:\n{rejected[-1]}")
            continue
        log(f"fetched {store.url}/{FOLDER}/{name}")
        return folder
    if rejected and not good:
        raise CheckpointError(
            f"no checkpoint in {store.url} can be used; choose another one, or start over (--fresh)\n"
            + "\n".join(rejected)
        )
    return None


def best_name(store: ObjectStore) -> str:
    """Return the name of the checkpoint that the store's best.json names, "" without one."""
    record, _ = parse(store.read(f"{FOLDER}/best.json") or b"", {"checkpoint": str, "*": object})
    return record["checkpoint"] if record else ""


def fetch_best(store: ObjectStore, run: Path, log: Callable[[str], None]) -> None:
    """Fetch the store's best checkpoint, if it is not here, so that a session on another machine keeps and exports it.

    A damaged one is left out with a line. For rank 0. Raises StorageError: the store does not answer.
    """
    name = best_name(store)
    if not name or name not in committed(store) or (run / FOLDER / name).exists():
        return
    try:
        _fetch(store, run / FOLDER, name)
        log(f"fetched {store.url}/{FOLDER}/{name}, the best one")
    except DamagedManifest as error:
        log(f"skipped an unusable checkpoint:\n  {store.url}/{FOLDER}/{name}/{error.damage}")


def verify(store: ObjectStore, name: str, folder: Path) -> None:
    """Download one checkpoint into a folder and compare size and SHA-256 of every file.

    Raises:
        DamagedManifest: the first problem found.
        StorageError: the store does not answer.
    """
    for file in (MARKER, MANIFEST):
        content = store.read(f"{FOLDER}/{name}/{file}")
        if content is None:
            raise DamagedManifest(file, "a file", "no such object, or a damaged one")
        (folder / file).write_bytes(content)
    _, records = read_manifest(LocalFileSystem(), folder)
    sizes = store.sizes(f"{FOLDER}/{name}")
    for record in records:
        num_bytes = sizes.get(record.name)
        if num_bytes != record.size:
            there = "no such object" if num_bytes is None else f"{num_bytes} bytes"
            raise DamagedManifest(record.name, f"{record.size} bytes", there)
        store.download(f"{FOLDER}/{name}/{record.name}", folder / record.name, record.size)
    for damage in check_files(LocalFileSystem(), folder):
        raise DamagedManifest(*damage)


def _fetch(store: ObjectStore, directory: Path, name: str) -> Path:
    files, partial, final = LocalFileSystem(), directory / f"{PARTIAL}{name}", directory / name
    with storage_errors(partial):
        directory.mkdir(exist_ok=True)
        deleted = directory / f"{DELETED}{name}"
        for debris in (partial, deleted):  # of a killed start
            if debris.exists():
                files.remove_folder(debris)
        partial.mkdir()
        try:
            verify(store, name, partial)
        except DamagedManifest:  # damaged in the store, or during the transfer: fetch it once more
            verify(store, name, partial)
        for file in (MARKER, MANIFEST):  # ObjectStore.download has synced the others
            with open(partial / file, "rb+") as opened:
                files.sync(opened)
        files.sync_folder(partial)
        if final.exists():  # damaged, or it would have been used
            files.rename(final, deleted)
        files.rename(partial, final)
        files.sync_folder(directory)
    return final


def _fetch_history(store: ObjectStore, run: Path, step: int) -> None:
    """Fetch the records of the earlier session, unless those of this folder reach as far as its checkpoint."""
    if (record := last_record(run / HISTORY[-1])) and record["step"] >= step:
        return
    sizes = store.sizes("")
    if (ids := store.read(RUN_IDS)) is not None:  # so that the trackers go on with the same runs
        with storage_errors(run / RUN_IDS):
            (run / RUN_IDS).parent.mkdir(exist_ok=True)
            write_bytes(run / RUN_IDS, [ids])
    for name in (name for name in HISTORY if name in sizes):
        partial = run / f".{name}.partial"
        with storage_errors(partial):
            store.download(name, partial, sizes[name])
            os.replace(partial, run / name)


def committed(store: ObjectStore) -> list[str]:
    """List the names of the store's committed checkpoints, newest first."""
    marked = [name for name in step_names(store) if MARKER in store.folders(f"{FOLDER}/{name}")]
    return sorted(marked, key=lambda name: int(name[5:]), reverse=True)


def step_names(store: ObjectStore) -> list[str]:
    """List the names of all checkpoint folders of the store, committed or not."""
    return [name for name in store.folders(FOLDER) if re.fullmatch("step_[0-9]{8,}", name)]
