"""Folder lock: at most one live run per directory, independent of how runs are started and end."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import IO

from samecurve.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # on Windows there is no lock; everything else works
    fcntl = None

# among them NFS without lockd (ENOLCK) and Lustre mounted without -o flock (ENOSYS)
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
POLL_SECONDS = 1.0
# On NFSv4 a dead host's lock lasts until the server's lease expires: 90 s on Linux (nfsd4_lease, fs/nfsd/nfs4state.c).
DEAD_HOST_SECONDS = 120.0


def lock_folder(path: Path, patience_seconds: float = 0.0) -> IO:
    """Lock a folder and return the open lock file. The kernel releases the lock however the process ends.

    Where the file system has no locks (NO_LOCKS_HERE), the file is returned unlocked.

    Raises ConfigurationError if another process still has the lock after `patience_seconds`.
    """
    # writable: NFS makes flock a byte-range lock, and an exclusive one needs that (flock(2))
    stream = open(path / ".lock", "a")
    if fcntl is None:
        return stream
    deadline = time.monotonic() + patience_seconds
    try:
        while not _taken(stream, deadline):
            time.sleep(POLL_SECONDS)
    except BlockingIOError as error:
        stream.close()
        raise ConfigurationError(
            f"output_dir: another run is writing into {path}; wait for it, end it, or choose another output_dir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
    return stream


def _taken(stream: IO, deadline: float) -> bool:
    """Try to take the lock. Raises BlockingIOError if another process has it and the deadline has passed."""
    assert fcntl is not None  # lock_folder asks first
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if time.monotonic() >= deadline:
            raise
        return False
    return True
