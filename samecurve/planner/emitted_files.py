"""Files of a plan in a folder: written whole, without those of an earlier plan and without losing the user's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samecurve.errors import ConfigurationError
from samecurve.storage.atomic import storage_errors

RECORD = "plan.json"  # names the files of its plan under "files", each with a digest
RECIPE = "recipe.yaml"  # stays when a later plan has none: recipes of the user may have it as their base


def write(folder: str, texts: Mapping[str, str], record: Mapping[str, Any]) -> list[str]:
    """Write a plan's files and its record, and remove other files of the earlier plan in the folder.

    Args:
        folder: created if it does not exist.
        texts: content by name.
        record: content of plan.json.

    Returns:
        The names of the files.

    Raises:
        ConfigurationError: a file that would be replaced or removed is not as an earlier plan wrote it.
    """
    directory = Path(folder)
    digests = {name: _digest(text.encode()) for name, text in texts.items()}
    whole = {**texts, RECORD: json.dumps({**record, "files": digests}, indent=1) + "\n"}
    with storage_errors(directory):
        stale = _stale(directory, digests)
        directory.mkdir(parents=True, exist_ok=True)
        for path in stale:
            path.unlink()
        for name, text in whole.items():
            path = directory / name
            path.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                path.chmod(0o755)
    return [*whole]


def remove(folder: str, names: Iterable[str]) -> None:
    """Remove files that `write` has written, so that nobody starts what turned out to be refused."""
    with storage_errors(Path(folder)):
        for name in names:
            (Path(folder) / name).unlink(missing_ok=True)


def _stale(directory: Path, digests: Mapping[str, str]) -> list[Path]:
    """Return the files of an earlier plan that this one does not have. Raises ConfigurationError for changed ones."""
    earlier = _earlier(directory)
    names = dict.fromkeys([*digests, *(name for name in earlier or () if name != RECIPE)])
    found = {name: _digest((directory / name).read_bytes()) for name in names if (directory / name).exists()}
    changed = [name for name, digest in found.items() if digest not in (digests.get(name), (earlier or {}).get(name))]
    changed += [RECORD] if earlier is None else []
    if changed:
        told = f"--output {directory}: {', '.join(changed)}: not written by an earlier plan, or changed since"
        raise ConfigurationError(f"{told}; move what you need away, or give another folder")
    return [directory / name for name in found if name not in digests]


def _earlier(directory: Path) -> dict[str, str] | None:
    """Read the digests of an earlier plan's files; {} without one, None if plan.json is another file of that name."""
    path = directory / RECORD
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        # names alone: nothing outside of the folder is ever removed
        return {name: str(digest) for name, digest in files.items() if Path(name).name == name}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
