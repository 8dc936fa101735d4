"""Tests whether a folder is shared by all hosts and keeps what the commit protocol of checkpoints relies on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from samecurve.doctor.findings import Finding, failed
from samecurve.errors import ConfigurationError, StorageError
from samecurve.storage.file_lock import lock_folder
from samecurve.storage.filesystem import LocalFileSystem, appears

PATIENCE_SECONDS = 10.0


class SharedFolder:
    """A folder inside `output_dir` for the time of the test. One host leads, the others follow."""

    def __init__(self, output_dir: Path, name: str):
        self.path = output_dir / f".doctor-{name}"

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Make the folder with a synced and renamed file in it and hold its lock; afterwards remove it.

        Raises:
            OSError: an operation that checkpoints need fails here.
        """
        disk = LocalFileSystem()
        self.path.mkdir(parents=True)
        try:
            with disk.create(self.path / "partial") as file:
                file.write(b"written by the first host")
                disk.sync(file)
            disk.rename(self.path / "partial", self.path / "whole")
            disk.sync_folder(self.path)
            with lock_folder(self.path):
                yield
        finally:
            disk.remove_folder(self.path)
            with contextlib.suppress(OSError):  # it is not empty, or was there before
                self.path.parent.rmdir()

    def follow(self) -> str:
        """Look at the folder from another host. Returns what is wrong, "" if nothing is."""
        if not appears(self.path / "whole", PATIENCE_SECONDS):
            return "what the first host writes is not seen here"
        if (self.path / "partial").exists():
            return "a renamed file still has its old name here"
        try:
            lock_folder(self.path).close()
        except (ConfigurationError, OSError):  # the lock is taken, as it should be
            return ""
        return "a lock that the first host has (flock) is not seen here"


def alone(output_dir: Path) -> Finding:
    """Test the folder from this host only."""
    try:
        with SharedFolder(output_dir, str(os.getpid())).led():
            return Finding("shared", f"output_dir {output_dir}: written, synced, renamed and locked")
    except OSError as error:
        problem = f"{error.filename or output_dir}: {error.strerror}"
        return failed("shared", f"output_dir {output_dir}", problem, "set output_dir to another folder", StorageError)


def judge(output_dir: str, seen_by: dict[str, str]) -> Finding:
    """Judge whether the hosts share output_dir. seen_by: host to what `follow` returned there."""
    wrong = {host: problem for host, problem in seen_by.items() if problem}
    seen = f"output_dir {output_dir}: written and renamed on one host, read on {len(seen_by)}"
    if not wrong:
        return Finding("shared", f"{seen}, lock held")
    problem = "; ".join(f"{host}: {text}" for host, text in wrong.items())
    if all("flock" in text for text in wrong.values()):
        fix = "mount it with locks (Lustre: -o flock; NFS: without nolock), or never start two runs in one output_dir"
        return Finding("shared", seen, problem, fix)
    return failed("shared", seen, problem, "set output_dir to a folder that all hosts mount", StorageError)
