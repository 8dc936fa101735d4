"""Data sets of the Hugging Face hub by name: their files are downloaded into the hub's cache and read like others."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import DataError
from .tables import TABLES

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_FILE = re.compile(r"\.[A-Za-z]\w{0,7}$")  # `owner/name.jsonl` was meant as a file, `owner/name-v1.5` was not
_READ = (*TABLES, ".txt")


def is_name(path: str) -> bool:
    """Whether it can only be OWNER/NAME on the hub: nothing of that name is here, nor a folder that it would be in."""
    looks_like_one = _NAME.fullmatch(path) is not None and _FILE.search(path) is None
    return looks_like_one and not Path(path).exists() and not Path(path).parent.exists()


def folder(name: str, pattern: str | None) -> Path:
    """Where the data set's files lie now: those that `pattern` matches, by default tables and plain texts.

    Raises DataError where it can be neither downloaded nor found in the hub's cache.
    """
    from huggingface_hub import snapshot_download

    # the hub's patterns know no `**/`, and their `*` crosses folders
    by_kind = [f"*{kind}{compressed}" for kind in _READ for compressed in ("", ".*")]
    wanted = [pattern, pattern.replace("**/", "")] if pattern else by_kind
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=wanted))
    except Exception as error:  # the hub's own, its HTTP library's, the disk's
        raise DataError(
            f"{name}: there is no such file or folder here, and as a data set of the hub it cannot be read: "
            f"{_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "GatedRepoError"):
        return "the hub has none of that name, or shows it only to members; for those: hf auth login"
    if kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
        offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE")
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        return f"it is not in the hub's cache, and {why}"
    lines = str(error).strip().splitlines() or [""]
    return f"{kind}: {lines[0][:200]}"
