"""SHA256SUMS: the hashes of a model folder's files, in the format of coreutils (`sha256sum --check SHA256SUMS`).

A weight, a tokenizer or a config with one flipped bit still loads: only a hash tells. The card is not listed, because
its owner edits it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from samecurve.errors import CheckpointError
from samecurve.storage.atomic import storage_errors, write_bytes

SUMS = "SHA256SUMS"
_NOT_LISTED = (SUMS, "README.md", "loss.svg")
_LINE = re.compile(r"([0-9a-f]{64})  (?!/)(?!.*(?:^|/)\.\.(?:/|$))(.+)")


def write_checksums(folder: Path, busy: Callable[[], None] = lambda: None) -> None:
    """Write the hashes of all files of a finished model folder. Raises StorageError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _NOT_LISTED)
    with storage_errors(folder):
        lines = [f"{file_sha256(path, busy)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    write_bytes(folder / SUMS, ["".join(lines).encode(errors="surrogateescape")])  # names as they are


def check_checksums(folder: Path, busy: Callable[[], None] = lambda: None) -> None:
    """Compare a folder with its SHA256SUMS; without one nothing is known. busy: called while files are read.

    Raises CheckpointError, with every file that is not what was written.
    """
    fix = f"copy or export the model again; or delete {SUMS} if you changed the file yourself"
    problems = []
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(f"{folder / SUMS}: {error.strerror or error}; {fix}") from error
    for line in lines or [""]:
        match = _LINE.fullmatch(line)
        if match is None:
            problems.append(f"{folder / SUMS}: damaged: {line!r:.80}")
            continue
        path = folder / match[2]
        try:
            if file_sha256(path, busy) != match[1]:
                problems.append(f"{path}: differs from what was written, by {SUMS}")
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    if problems:
        raise CheckpointError("\n".join([*problems, fix]))


def file_sha256(path: Path, busy: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file in hexadecimal. busy: called after each piece. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 24):
            digest.update(piece)
            busy()
    return digest.hexdigest()


# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md: a pointer has fewer bytes than this
POINTER_BYTES = 1024
_VERSION = b"version https://git-lfs.github.com/spec/v1\n"


def pointer_problem(name: str, head: bytes | None = None) -> str:
    """Return the message for a file that is only a pointer; "" for any other file, and for one that cannot be read.

    Args:
        name: name of the file.
        head: the first POINTER_BYTES bytes of the file, or all of a shorter one. None: read them from the local file.
    """
    if head is None:
        try:
            with open(name, "rb") as stream:
                head = stream.read(POINTER_BYTES)
        except OSError:
            return ""
    if not head.startswith(_VERSION) or len(head) >= POINTER_BYTES:
        return ""
    return f"{name}: the file is a Git LFS pointer, not the content; run `git lfs pull` in its repository"


def folder_problem(folder: Path) -> str:
    """Return the message for a model's folder of which some files are only pointers; "" if none is."""
    files = sorted(file for kind in ("json", "safetensors", "model", "jinja") for file in folder.glob(f"*.{kind}"))
    problems = [problem for file in files if (problem := pointer_problem(str(file)))]
    if len(problems) > 1:
        return f"{problems[0]} (and {len(problems) - 1} more such files)"
    return "".join(problems)
