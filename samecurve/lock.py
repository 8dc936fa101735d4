"""One live run per directory, whatever started it and however it ends."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

from .errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows: no lock, everything else works
    fcntl = None

NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


def lock(path: Path) -> IO:
    """An open file with an exclusive lock, which the kernel releases when the process ends, however it ends.

    Raises ConfigurationError where another process holds it.
    """
    stream = open(path / ".lock", "a")
    if fcntl is None:
        return stream
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise ConfigurationError(
            f"output_dir: another run is writing into {path}; wait for it, end it, or choose another output_dir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
    return stream
