"""Pointers that Git LFS leaves in place of files that were not downloaded."""

from __future__ import annotations

from pathlib import Path

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
