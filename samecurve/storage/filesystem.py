"""File system operations of the commit protocol, as an interface so that tests can substitute a failing disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from samecurve.errors import CheckpointError

PIECE_BYTES = 32 << 20
UNKNOWN_BYTES = sys.maxsize
LONGEST_NAME, LONGEST_PATH = 255, 4095  # in bytes: of nearly all file systems, and of Linux


def name_problem(path: str | os.PathLike[str]) -> str:
    """Return why there can be no file of this path, in words; "" if there can.

    For such a path `open` raises ValueError or OSError, and so do the methods of Path that only ask.
    """
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        return "which has a character that no file name can have"
    if b"\0" in name:
        return "which has a NUL, and no file name can have one"
    longest = max(map(len, name.split(b"/")))
    if longest > LONGEST_NAME:
        return f"but a name in it has {longest} bytes and file systems take {LONGEST_NAME}; shorten it"
    return f"but it has {len(name)} bytes and paths have {LONGEST_PATH} at most" if len(name) > LONGEST_PATH else ""


def next_free(folder: Path) -> Path:
    """Return the first of FOLDER-2, FOLDER-3, ... that does not exist; after FOLDER-2 comes FOLDER-3."""
    stem = re.sub(r"-\d{1,3}$", "", folder.name)
    return next(path for number in count(2) if not (path := folder.with_name(f"{stem}-{number}")).exists())


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path below `folder` leads out of it over a link. The folder itself may be reached over one."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_links(folder: Path, parent: Path | None = None) -> None:
    """Raise CheckpointError for a link out of a folder: a copy to share would hold what it leads to.

    parent: the folder itself must not lead out of it.
    """
    for path, inside in ((folder, parent or folder), *((path, folder) for path in folder.rglob("*"))):
        if leads_out(path, inside):
            target = os.path.realpath(path)
            raise CheckpointError(f"{path}: a link to {target}, which is outside of {inside}; remove it")


def is_own_file(path: Path) -> bool:
    """Whether a file is one of its model's folder; in the hub's cache a snapshot's links lead to the repository's."""
    folder, repository = path.parent, path.parent.parent.parent
    is_cached = folder.parent.name == "snapshots" and repository.name.startswith("models--")
    return path.is_file() and not leads_out(path, repository if is_cached else folder)


class WritableFile(Protocol):
    def write(self, data: Any, /) -> int: ...


class FileSystem(Protocol):
    """File system interface. Every operation may raise OSError. Nothing survives a power cut before it is synced."""

    def folders(self, folder: Path) -> list[str]:
        """List the names of the subfolders; [] if the folder does not exist."""
        ...

    def exists(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int:
        """Return the size of a file in bytes."""
        ...

    def read(self, path: Path) -> Iterator[bytes]:
        """Read a file in pieces."""
        ...

    def create(self, path: Path) -> AbstractContextManager[WritableFile]:
        """Create an empty file and open it for writing."""
        ...

    def sync(self, file: Any) -> None:
        """Make an open file's content durable, but not its name."""

    def sync_folder(self, folder: Path) -> None:
        """Make a folder's entries durable: names of files created, renamed or removed in it."""

    def make_folder(self, path: Path) -> None: ...

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically. `new` must be in the same folder and must not exist."""

    def remove_folder(self, path: Path) -> None:
        """Remove a folder with everything in it; not atomic."""

    def free_bytes(self, folder: Path) -> int:
        """Return the free space; UNKNOWN_BYTES if the disk does not say."""
        ...


class LocalFileSystem:
    """`FileSystem` implemented with `os`, for a local or mounted disk (NFS, Lustre, ...).

    busy: called between pieces, files and syncs, to report progress of long operations.
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
            # os.path.exists answers False to any error, such as EIO
            os.stat(path)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: Path) -> int:
        # Not os.stat: NFS may answer it from a cache. open() asks the server ("close-to-open consistency", nfs(5)).
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
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync folders and report one of these errors; PostgreSQL ignores the same
            # two (fsync_fname_ext in src/backend/storage/file/fd.c).
            if error.errno not in (errno.EBADF, errno.EINVAL):
                raise
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove_folder(self, path: Path) -> None:
        # file by file, because rmtree would report no progress
        for file in path.rglob("*"):
            if not file.is_dir():
                file.unlink()
                self._busy()
        shutil.rmtree(path)

    def move_folder(self, old: Path, into: Path) -> None:
        """Move a folder into another one, by copying if that is on another disk.

        After a kill at any time, at least one of the two places has the whole folder.
        """

        def copy(source: str, target: str) -> None:
            with self.create(Path(target)) as file:
                for piece in self.read(Path(source)):
                    file.write(piece)
            shutil.copystat(source, target)

        shutil.move(old, into, copy)

    def free_bytes(self, folder: Path) -> int:
        # some network file systems and FUSE mounts report 0: unknown. A full disk refuses the first write.
        return shutil.disk_usage(folder).free or UNKNOWN_BYTES


def appears(path: Path, seconds: float) -> bool:
    """Whether a file that another host has written is seen here within that time.

    NFS shows another host's new names after at most acdirmin, 30 s by default, mostly at once.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        os.listdir(path.parent if path.parent.exists() else ".")  # makes NFS ask the server
        time.sleep(0.1)
    return True


def make_durable_folder(path: Path) -> None:
    """Create a folder and its missing parents and sync their names, so that all of them survive a power cut."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        LocalFileSystem().sync_folder(folder.parent)
