"""Folder lock: at most one live run per directory, independent of how runs are started and end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
import uuid
from pathlib import Path
from typing import IO

import psutil

from samecurve.errors import ConfigurationError, StorageError
from samecurve.storage.host import machine
from samecurve.storage.records import COUNT, read_record

try:
    import fcntl
except ImportError:  # on Windows there is no flock
    fcntl = None

# among them NFS without lockd (ENOLCK) and Lustre mounted without -o flock (ENOSYS)
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
POLL_SECONDS = 1.0
# On NFSv4 a dead host's lock lasts until the server's lease expires: 90 s on Linux (nfsd4_lease, fs/nfsd/nfs4state.c).
DEAD_HOST_SECONDS = 120.0
OWNER = ".lock.owner"
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0


def lock_folder(path: Path, patience_seconds: float = 0.0) -> IO | OwnerFile:
    """Lock a folder. The lock ends however the process ends: the kernel releases it.

    Where the file system has no locks (NO_LOCKS_HERE), a file takes their place, see OwnerFile.

    Raises:
        ConfigurationError: another process still has the lock after `patience_seconds`.
        OSError: the folder cannot be written.
    """
    deadline = time.monotonic() + patience_seconds
    # writable: NFS makes flock a byte-range lock, and an exclusive one needs that (flock(2))
    stream = open(path / ".lock", "a")
    while True:
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "no flock")
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stream
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                stream.close()
                raise
            with contextlib.suppress(FileExistsError):
                return OwnerFile(path, stream)
        if time.monotonic() >= deadline:
            stream.close()
            raise ConfigurationError(
                f"output_dir: another run is writing into {path}; wait for it, end it, or choose another output_dir"
                f"{_owner_text(path / OWNER)}"
            )
        time.sleep(POLL_SECONDS)


class OwnerFile:
    """A lock for file systems without flock: a file that says who has the folder, touched every BEAT_SECONDS.

    It is stale when its process is gone, as seen from the same machine, or when it was not touched for STALE_SECONDS.
    Both times are the file system's own, so hosts may have different clocks. A process that was suspended for longer
    and finds another owner ends at once, because it must not write any more.

    Raises:
        FileExistsError: another process has the folder.
    """

    def __init__(self, folder: Path, stream: IO):
        self._path, self._stream = folder / OWNER, stream
        own = {"machine": machine(), "pid": os.getpid(), "started": psutil.Process().create_time()}
        self._content = json.dumps(own | {"id": uuid.uuid4().hex})
        try:
            _create(self._path, self._content)
        except FileExistsError:
            self._take_over()
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _take_over(self) -> None:
        """Replace a stale owner. A second file lets one process at a time do that; an old one is a killed process's."""
        claim = self._path.with_name(f"{OWNER}.claim")
        if not _is_stale(self._path):
            raise FileExistsError(str(self._path))
        if claim.exists() and _age(claim) > STALE_SECONDS:
            claim.unlink(missing_ok=True)
        _create(claim, self._content)
        try:
            if not _is_stale(self._path):  # another process has taken over meanwhile
                raise FileExistsError(str(self._path))
            self._path.unlink(missing_ok=True)
            _create(self._path, self._content)
        finally:
            claim.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # slow storage; the next beat comes
                if self._path.read_text(encoding="utf-8") != self._content:
                    os.write(2, f"{self._path}: another process has taken over this folder; this one ends\n".encode())
                    os._exit(StorageError.exit_code)
                os.utime(self._path)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError):
                if self._path.read_text(encoding="utf-8") == self._content:
                    self._path.unlink()
            self._stream.close()

    def __enter__(self) -> OwnerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(path: Path, content: str) -> None:
    with open(path, "x", encoding="utf-8") as stream:
        stream.write(content)


def _owner(path: Path) -> dict:
    return read_record(path, {"machine": str, "pid": COUNT, "started": float}).value or {}


def _owner_text(path: Path) -> str:
    owner = _owner(path)
    if not owner:
        return ""
    host = str(owner.get("machine")).split(" ")[0]
    return f" (process {owner.get('pid')} on {host}; {path} counts for {STALE_SECONDS:.0f} s after it was lost)"


def _is_stale(path: Path) -> bool:
    owner = _owner(path)
    try:
        if owner.get("machine") == machine():
            process = psutil.Process(owner["pid"])
            # to two seconds: computed from the time of booting, which the system corrects with its clock
            is_same = abs(process.create_time() - owner["started"]) < 2
            return not is_same or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return _age(path) > STALE_SECONDS
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True
    except (psutil.Error, KeyError, TypeError, ValueError):
        return _age(path) > STALE_SECONDS


def _age(path: Path) -> float:
    """Seconds since a file was touched, by the clock of its file system."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        _create(probe, "")
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)
