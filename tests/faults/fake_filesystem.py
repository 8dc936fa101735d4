"""A disk in memory that knows what a power cut leaves of it.

What a program sees and what is durable are two things here: a file's content becomes durable with `sync` of that file,
names in a folder (created, renamed, removed) with `sync_folder` of that folder, and nothing else makes them durable.
That is what POSIX promises, and less than ext4 or XFS do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path

Entries = dict[str, "File | Folder"]


class File:
    def __init__(self, data: bytes = b"", durable: bytes = b""):
        self.data, self.durable = data, durable


class Change:
    """Names that changed in one operation: None for one that is gone. A rename is one change of two names."""

    def __init__(self, names: dict[str, File | Folder | None]):
        self.names = names

    def apply(self, entries: Entries) -> None:
        for name, node in self.names.items():
            entries.pop(name, None)
            if node is not None:
                entries[name] = node


class Folder:
    def __init__(self, durable: Entries | None = None):
        self.durable: Entries = dict(durable or {})
        self.entries: Entries = dict(self.durable)
        self.pending: list[Change] = []

    def change(self, names: dict[str, File | Folder | None]) -> None:
        change = Change(names)
        change.apply(self.entries)
        self.pending.append(change)


class OpenFile:
    """Writes are not buffered. One that fails or is interrupted has written its first half."""

    def __init__(self, disk: FakeFileSystem, path: Path, file: File):
        self.disk, self.path, self.file = disk, path, file

    def write(self, data: bytes) -> int:
        data = bytes(data)
        try:
            self.disk.before("write", self.path)
        except BaseException:
            self.file.data += data[: len(data) // 2]
            raise
        self.file.data += data
        return len(data)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_) -> None:
        pass


class FakeFileSystem:
    """samecurve.storage.filesystem.FileSystem.

    before(operation, path): called before each operation and may raise in its place.
    ignores(operation, path): whether a sync does nothing while it says that all is well.
    """

    def __init__(self, root: Folder | None = None):
        self.root = root or Folder()
        self.capacity = 1 << 40
        self.before: Callable[[str, Path], None] = lambda operation, path: None
        self.ignores: Callable[[str, Path], bool] = lambda operation, path: False

    # The operations

    def folders(self, folder: Path) -> list[str]:
        self.before("folders", folder)
        node = self._find(folder)
        return [name for name, child in node.entries.items() if isinstance(child, Folder)] if node else []

    def exists(self, path: Path) -> bool:
        self.before("exists", path)
        return self._find(path) is not None

    def size(self, path: Path) -> int:
        self.before("size", path)
        return len(self._there(path, File).data)

    def read(self, path: Path) -> Iterator[bytes]:
        self.before("read", path)
        yield self._there(path, File).data

    def create(self, path: Path) -> OpenFile:
        self.before("create", path)
        file = File()
        self._there(path.parent, Folder).change({path.name: file})
        return OpenFile(self, path, file)

    def sync(self, file: OpenFile) -> None:
        self.before("sync", file.path)
        if not self.ignores("sync", file.path):
            file.file.durable = file.file.data

    def sync_folder(self, folder: Path) -> None:
        self.before("sync_folder", folder)
        node = self._there(folder, Folder)
        if not self.ignores("sync_folder", folder):
            node.durable, node.pending = dict(node.entries), []

    def make_folder(self, path: Path) -> None:
        self.before("make_folder", path)
        self._there(path.parent, Folder)
        if self._find(path) is not None:
            raise _error(errno.EEXIST, path)
        self._there(path.parent, Folder).change({path.name: Folder()})

    def rename(self, old: Path, new: Path) -> None:
        self.before("rename", old)
        if self._find(new) is not None:
            raise _error(errno.ENOTEMPTY, new)
        assert old.parent == new.parent
        self._there(old.parent, Folder).change({old.name: None, new.name: self._there(old)})

    def remove_folder(self, path: Path) -> None:
        folder = self._there(path, Folder)
        for name in list(folder.entries):
            self.before("unlink", path / name)
            folder.change({name: None})
        self.before("rmdir", path)
        self._there(path.parent, Folder).change({path.name: None})

    def free_bytes(self, folder: Path) -> int:
        self.before("free_bytes", folder)
        return self.capacity - sum(len(file.data) for file in _files(self.root))

    # For tests

    def files(self, folder: Path) -> dict[str, bytes]:
        """Of one folder, without counting as an operation."""
        return {name: node.data for name, node in self._there(folder, Folder).entries.items() if isinstance(node, File)}

    def names(self, folder: Path) -> set[str]:
        node = self._find(folder)
        return set(node.entries) if node else set()

    def put(self, path: Path, data: bytes) -> None:
        """A durable file, its folder too; an existing one changes its content."""
        node = self.root
        for part in path.parts[1:-1]:
            if part not in node.entries:
                node.durable[part] = node.entries[part] = Folder()
            node = node.entries[part]
        node.durable[path.name] = node.entries[path.name] = File(data, data)

    def copy(self) -> FakeFileSystem:
        return FakeFileSystem(deepcopy(self.root))

    def pending(self) -> list[Change]:
        """Changes of names that are not durable, in all folders that are still reachable by a name, new or old."""
        return [change for folder in _folders(self.root) for change in folder.pending]

    def survivor(self, changes: Iterable[Change], content: Callable[[File], bytes]) -> FakeFileSystem:
        """What is left when these changes of names reached the disk, and this of each file's content."""
        kept = set(map(id, changes))

        def left_of(node: File | Folder) -> File | Folder:
            if isinstance(node, File):
                data = content(node)
                return File(data, data)
            entries = dict(node.durable)
            for change in node.pending:
                if id(change) in kept:
                    change.apply(entries)
            return Folder({name: left_of(child) for name, child in entries.items()})

        return FakeFileSystem(left_of(self.root))

    def after_power_cut(self) -> Iterator[tuple[str, FakeFileSystem]]:
        """What may be left when the power goes now: the extremes, the nasty mixtures, each change of a name alone."""
        pending = self.pending()
        yield "nothing unsynced survived", self.survivor([], _durable)
        yield "all survived", self.survivor(pending, _seen)
        yield "names survived, contents did not", self.survivor(pending, _durable)
        yield "names and sizes survived, contents did not", self.survivor(pending, _zeros)
        yield "contents survived, names did not", self.survivor([], _seen)
        for change in pending:
            alone = " and ".join(f"{'no ' if node is None else ''}{name}" for name, node in change.names.items())
            yield f"of the names only: {alone}", self.survivor([change], _durable)
            yield f"all but: {alone}", self.survivor([other for other in pending if other is not change], _seen)

    def state(self) -> str:
        """Equal for disks that look equal and are durable."""
        return repr(_plain(self.root))

    def _find(self, path: Path) -> File | Folder | None:
        node = self.root
        for part in path.parts[1:]:
            node = node.entries.get(part) if isinstance(node, Folder) else None
        return node

    def _there(self, path: Path, kind: type = object) -> File | Folder:
        node = self._find(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        if not isinstance(node, kind):
            raise _error(errno.EISDIR if kind is File else errno.ENOTDIR, path)
        return node


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))


def _durable(file: File) -> bytes:
    return file.durable


def _seen(file: File) -> bytes:
    return file.data


def _zeros(file: File) -> bytes:
    """Delayed allocation: the size was written, the blocks were not."""
    return file.data if file.data == file.durable else bytes(len(file.data))


def _files(folder: Folder) -> Iterator[File]:
    return (node for each in _folders(folder) for node in each.entries.values() if isinstance(node, File))


def _folders(folder: Folder) -> Iterator[Folder]:
    yield folder
    seen = [*folder.entries.values(), *(node for node in folder.durable.values())]
    for node in {id(node): node for node in seen if isinstance(node, Folder)}.values():
        yield from _folders(node)


def _plain(node: File | Folder) -> bytes | dict:
    return node.data if isinstance(node, File) else {name: _plain(node.entries[name]) for name in sorted(node.entries)}
