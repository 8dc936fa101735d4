"""What the commit protocol asks of a disk, so that a test can put a disk that fails in its place."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

PIECE_BYTES = 32 << 20


class WritableFile(Protocol):
    def write(self, data: Any, /) -> int: ...


class FileSystem(Protocol):
    """Every operation may raise OSError. Nothing is durable, i.e. survives a power cut, before it is synced."""

    def folders(self, folder: Path) -> list[str]:
        """Names of the folders in it; [] when it is not there."""

    def exists(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int:
        """Of a file, in bytes."""

    def read(self, path: Path) -> Iterator[bytes]:
        """A file's content in pieces."""

    def create(self, path: Path) -> AbstractContextManager[WritableFile]:
        """An empty file, open for writing."""

    def sync(self, file: Any) -> None:
        """Make an open file's content durable; not its name."""

    def sync_folder(self, folder: Path) -> None:
        """Make durable which names the folder holds: files created, renamed and removed in it."""

    def make_folder(self, path: Path) -> None: ...

    def rename(self, old: Path, new: Path) -> None:
        """Atomic. `new` is in the same folder and does not exist."""

    def remove_folder(self, path: Path) -> None:
        """With everything in it; not atomic."""

    def free_bytes(self, folder: Path) -> int: ...


class LocalFileSystem:
    """`FileSystem` over `os`: a local disk or a mounted one (NFS, Lustre, ...).

    busy: called between pieces, files and syncs, which says that long work gets on.
    """

    def __init__(self, busy: Callable[[], None] = lambda: None):
        self._busy = busy

    def folders(self, folder: Path) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        try:
            os.stat(path)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: Path) -> int:
        # Not os.stat: NFS answers it from a cache; opening asks the server ("close-to-open consistency", nfs(5)).
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size

    def read(self, path: Path) -> Iterator[bytes]:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                self._busy()
                yield piece

    def create(self, path: Path) -> AbstractContextManager[WritableFile]:
        return open(path, "wb")

    def sync(self, file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())
        self._busy()

    def sync_folder(self, folder: Path) -> None:
        if os.name == "nt":  # no handle of a folder can be flushed there
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync folders and say so with these; PostgreSQL ignores the same two
            # (fsync_fname_ext in src/backend/storage/file/fd.c).
            if error.errno not in (errno.EBADF, errno.EINVAL):
                raise
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove_folder(self, path: Path) -> None:
        for file in path.rglob("*"):
            if not file.is_dir():
                file.unlink()
                self._busy()
        shutil.rmtree(path)

    def move_folder(self, old: Path, into: Path) -> None:
        """Into a folder that may be on another disk, where it is copied; a kill leaves it whole in one of both."""

        def copy(source: str, target: str) -> None:
            with self.create(Path(target)) as file:
                for piece in self.read(Path(source)):
                    file.write(piece)
            shutil.copystat(source, target)

        shutil.move(old, into, copy)

    def free_bytes(self, folder: Path) -> int:
        usage = shutil.disk_usage(folder)
        return usage.free if usage.total else sys.maxsize  # some FUSE mounts report 0 of 0 bytes: unknown
