"""Folder lock: at most one live run per directory, independent of how runs are started and end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO

import psutil

from samecurve.errors import ConfigurationError, StorageError
from samecurve.storage.records import COUNT, parse, read_record

# among them NFS without lockd (ENOLCK) and Lustre mounted without -o flock (ENOSYS)
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
POLL_SECONDS = 1.0
# On NFSv4 a dead host's lock lasts until the server's lease expires: 90 s on Linux (nfsd4_lease, fs/nfsd/nfs4state.c).
DEAD_HOST_SECONDS = 120.0
OWNER = ".lock.owner"
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
_OWNER = {"machine": str, "pid": COUNT, "started": float}


_owned: set[OwnerFile] = set()  # by this process, see release_all


def lock_folder(path: Path, patience_seconds: float = 0.0, log: Callable[[str], None] | None = None) -> IO | OwnerFile:
    """Lock a folder. The lock ends however the process ends: the kernel releases it.

    Where the file system has no locks (NO_LOCKS_HERE), a file takes their place, see OwnerFile.

    Args:
        log: prints one line. With it, an owner on another host that may be lost is waited for, beyond the patience: for
            STALE_SECONDS, or until it gives a sign of life.

    Raises:
        ConfigurationError: another process still has the lock after `patience_seconds`.
        OSError: the folder cannot be written.
    """
    deadline = time.monotonic() + patience_seconds
    owner, beat, end = path / OWNER, None, deadline
    # writable: NFS makes flock a byte-range lock, and an exclusive one needs that (flock(2))
    stream = open(path / ".lock", "a")
    while True:
        try:
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
            latest = None  # when an owner on another machine last gave a sign of life, in ns
            if log is not None and _owner(owner).get("machine", machine()) != machine():
                with contextlib.suppress(OSError):
                    latest = owner.stat().st_mtime_ns
            if log is not None and latest is not None and beat is None:
                log(f"{path}: waiting up to {STALE_SECONDS:.0f} s for a sign of life of its owner{_owner_text(owner)}")
                beat = latest
                deadline = max(deadline, time.monotonic() + STALE_SECONDS + POLL_SECONDS)
            elif latest is not None and latest != beat:
                deadline = end
        if time.monotonic() >= deadline:
            stream.close()
            raise ConfigurationError(
                f"output_dir: another run is writing into {path}; wait for it, end it, or choose another output_dir"
                f"{_owner_text(owner)}"
            )
        time.sleep(POLL_SECONDS)


class OwnerFile:
    """A lock for file systems without flock: a file that says who has the folder, written every BEAT_SECONDS.

    It is stale when its process is gone, as seen from the same machine, or when it was not written for STALE_SECONDS.
    Both times are the file system's own, so hosts may have different clocks. A process that was suspended for longer
    and finds another owner ends at once, because it must not write any more.

    Raises:
        FileExistsError: another process has the folder.
    """

    def __init__(self, folder: Path, stream: IO):
        self._path, self._stream = folder / OWNER, stream
        self.pid = os.getpid()
        own = {"machine": machine(), "pid": self.pid, "started": _started(self.pid)}
        self._content = json.dumps(own | {"id": uuid.uuid4().hex})
        try:
            _create(self._path, self._content)
        except FileExistsError:
            self._take_over()
        self._closed, self._beating = threading.Event(), threading.Lock()
        _owned.add(self)
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _take_over(self) -> None:
        """Replace a stale owner. A second file lets one process at a time do that; an old one is a killed process's."""
        claim = self._path.with_name(f"{OWNER}.claim")
        if not _is_stale(self._path):
            raise FileExistsError(str(self._path))
        if STALE_SECONDS < _age(claim) < math.inf:  # infinite: just gone; another process may make its own now
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
            with contextlib.suppress(OSError), self._beating:  # slow storage; the next beat comes
                if not self._closed.is_set():
                    self._write()

    def _write(self) -> None:
        try:
            # not os.utime, which some file systems refuse; and without truncation, so that others can read it meanwhile
            with open(self._path, "rb+") as stream:
                if self._is_own(stream.read()):
                    stream.seek(0)
                    stream.write(self._content.encode())
                    stream.truncate()
                    return
        except FileNotFoundError:  # somebody has deleted it
            return _create(self._path, self._content)
        text = f"{self._path}: another process has taken over this folder; this one ends\n"
        os.write(2, text.encode(errors="backslashreplace"))
        os._exit(StorageError.exit_code)

    def _is_own(self, content: bytes) -> bool:
        """Whether a file names no other owner. An empty one may: another process has just created it."""
        return content == self._content.encode() or (bool(content) and bool(parse(content, _OWNER)[1]))

    def close(self) -> None:
        _owned.discard(self)
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError), self._beating:
                if self._is_own(self._path.read_bytes()):
                    self._path.unlink()
            self._stream.close()

    def __enter__(self) -> OwnerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def release_all() -> None:
    """Give up this process's locks that the kernel does not release, as the last thing before the process ends."""
    for lock in tuple(_owned):
        if lock.pid == os.getpid():  # not a forked worker
            lock.close()


def _create(path: Path, content: str) -> None:
    with open(path, "x", encoding="utf-8") as stream:
        stream.write(content)


def _owner(path: Path) -> dict:
    return read_record(path, _OWNER).value or {}


def _owner_text(path: Path) -> str:
    owner = _owner(path)
    if not owner:
        return ""
    host = owner["machine"].split(" ")[0]
    return f" (process {owner['pid']} on {host}; {path} counts for {STALE_SECONDS:.0f} s after it was lost)"


def _is_stale(path: Path) -> bool:
    owner = _owner(path)  # opening a file makes NFS ask the server for its times, see _age
    if owner.get("machine") == machine():
        try:
            process = psutil.Process(owner["pid"])
            is_gone = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return is_gone or _started(owner["pid"]) != owner["started"]
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            pass
    return _age(path) > STALE_SECONDS


def _started(pid: int) -> float:
    """Return when a process started: in clock ticks since boot, which no step of the clock changes; else in seconds.

    Raises psutil.Error if there is no such process.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # field 22 of proc_pid_stat(5); the second one, a name in brackets, may hold spaces
        return float(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    return psutil.Process(pid).create_time()


def _age(path: Path) -> float:
    """Return the seconds since a file was written, by the clock of its file system; infinity without the file."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        _create(probe, "")
        now = probe.stat().st_mtime
        with contextlib.suppress(FileNotFoundError):
            return now - path.stat().st_mtime
        return math.inf
    finally:
        probe.unlink(missing_ok=True)


def machine() -> str:
    """Return a text that is the same for all processes whose process ids can be compared.

    Built from host name, boot id and process id namespace. The host name alone is not enough: cloned machines have the
    same one, and each container has process ids of its own.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
