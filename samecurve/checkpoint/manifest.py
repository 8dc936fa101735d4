"""Manifest of a committed checkpoint: the list of its files, and their verification."""

from __future__ import annotations

import errno
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from samecurve.storage.filesystem import FileSystem
from samecurve.storage.records import parse

MANIFEST, MARKER = "manifest.json", "COMMITTED"
STEPS = "step_[0-9]{8,}"
"""Names of a run's checkpoints, as a regular expression."""


class FileRecord(NamedTuple):
    """A file listed in the manifest: name, size in bytes and SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


class FileDamage(NamedTuple):
    """A problem of one file of a checkpoint."""

    file: str
    expected: str
    actual: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, found {self.actual}"


class DamagedManifest(Exception):
    """The manifest or its marker is unusable. The arguments are the fields of a FileDamage."""

    @property
    def damage(self) -> FileDamage:
        return FileDamage(*self.args)


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def file_name(rank: int) -> str:
    """Name of the file that each rank must write; a rank may write other files too."""
    return f"rank_{rank:05d}.safetensors"


def list_checkpoints(fs: FileSystem, directory: Path, names: str = STEPS) -> list[Path]:
    """List the folders whose names match and end in a number, newest first. `check_files` verifies their content."""
    steps = {name: int(name.rpartition("_")[2]) for name in fs.folders(directory) if re.fullmatch(names, name)}
    # by number, because the name of a nine-digit step sorts before those of eight digits
    return [directory / name for name in sorted(steps, key=steps.__getitem__, reverse=True)]


def check_files(fs: FileSystem, folder: Path, small_only: bool = False) -> list[FileDamage]:
    """List every problem of a checkpoint; [] if it is good. Files that the manifest does not name are ignored.

    Args:
        small_only: of the ranks' files, check presence and size only, and hash the others.
    """
    try:
        _, files = read_manifest(fs, folder)
    except DamagedManifest as error:
        return [error.damage]
    problems = (
        _problem(fs, folder, record, hashes=not (small_only and record.name.startswith("rank_"))) for record in files
    )
    return [problem for problem in problems if problem]


def check_records(fs: FileSystem, folder: Path, records: list[FileRecord]) -> list[FileDamage]:
    """List the problems of some files of a checkpoint, after reading each of them once."""
    return [problem for record in records if (problem := _problem(fs, folder, record, hashes=True))]


def marked_digest(fs: FileSystem, folder: Path) -> str:
    """Read the manifest's sha256 from the marker: the same in folders with the same checkpoint.

    Raises:
        DamagedManifest: the marker cannot be read.
    """
    return str(_json(MARKER, _content(fs, folder, MARKER)).get("manifest_sha256"))


def read_manifest(fs: FileSystem, folder: Path) -> tuple[str, list[FileRecord]]:
    """Read and validate the manifest. Anyone can write one with a matching marker, so every field is checked.

    Returns:
        Its sha256, which the marker also has, and the files that it lists.

    Raises:
        DamagedManifest: manifest or marker is unusable.
    """
    marked = marked_digest(fs, folder)
    text = _content(fs, folder, MANIFEST)
    digest = hashlib.sha256(text).hexdigest()
    if marked != digest:
        raise DamagedManifest(MANIFEST, f"sha256 {marked}, as {MARKER} says", digest)
    manifest = _json(MANIFEST, text)
    step, world_size, items = (manifest.get(key) for key in ("step", "world_size", "files"))
    if type(step) is not int or type(world_size) is not int or not isinstance(items, list):
        raise DamagedManifest(
            MANIFEST, "integers step and world_size, a list files", f"{step!r}, {world_size!r}, {items!r:.40}"
        )
    files = []
    for item in items:
        match item:
            # int(size) also matches JSON's true and false
            case {"name": str(name), "size": int(size), "sha256": str(sha256)} if not isinstance(size, bool):
                files.append(FileRecord(name, size, sha256))
            case _:
                raise DamagedManifest(MANIFEST, "files with name, size and sha256", f"{item!r:.80}")
        if name in ("", ".", "..") or any(character in name for character in "/\\:\0"):
            raise DamagedManifest(MANIFEST, "names of files in this folder", repr(name))
    names = {record.name for record in files}
    if not 1 <= world_size <= len(names) or len(names) < len(files):
        raise DamagedManifest(MANIFEST, f"each rank's file once, for world_size {world_size}", f"{len(files)} names")
    for rank in range(world_size):
        if file_name(rank) not in names:
            raise DamagedManifest(
                MANIFEST, f"{file_name(rank)}, as world_size is {world_size}", "no such name in the list"
            )
    return digest, files


def _problem(fs: FileSystem, folder: Path, record: FileRecord, hashes: bool) -> FileDamage | None:
    path = folder / record.name
    try:
        size = fs.size(path)
        if size != record.size:
            return FileDamage(record.name, f"{record.size} bytes", f"{size} bytes")
        if not hashes:
            return None
        hashed = hashlib.sha256()
        for piece in fs.read(path):
            hashed.update(piece)
    except OSError as error:
        return FileDamage(record.name, f"{record.size} bytes", _reason(error))
    digest = hashed.hexdigest()
    return None if digest == record.sha256 else FileDamage(record.name, f"sha256 {record.sha256}", digest)


def _content(fs: FileSystem, folder: Path, name: str) -> bytes:
    try:
        return b"".join(fs.read(folder / name))
    except OSError as error:
        raise DamagedManifest(name, "a file", _reason(error)) from error


def _json(name: str, text: bytes) -> dict:
    content, problem = parse(text)
    if problem:
        raise DamagedManifest(name, "a JSON object", problem)
    return content


def _reason(error: OSError) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else errno.errorcode.get(error.errno or 0, str(error))
