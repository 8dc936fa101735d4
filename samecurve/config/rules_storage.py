"""Object storage: `output_dir` as a URL, and the rules of `checkpoint.mirror`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from samecurve.config.documents import Document
from samecurve.storage.object_store import is_url, url_problem

Finding = tuple[str, str]
LONGEST_NAME = 255


def split_output_url(document: Document) -> None:
    """Replace a URL in `output_dir` by a local folder, and set `checkpoint.mirror` to the URL.

    Done before anything makes a path of it: Path("s3://bucket") loses a slash.
    """
    url, block = document.get("output_dir"), document.content.get("checkpoint", {})
    if not isinstance(url, str) or not is_url(url) or not isinstance(block, dict):
        return
    if block.get("mirror") is not None:
        text = "output_dir is a URL, which is uploaded to already; remove checkpoint.mirror, or give a local output_dir"
        document.problem(("checkpoint", "mirror"), text)
        return
    document.content |= {"output_dir": str(staging_folder(url)), "checkpoint": block | {"mirror": url}}
    document.places[("checkpoint", "mirror")] = document.place(("output_dir",))


def staging_folder(url: str) -> Path:
    """Return the local run directory of a URL. Every host has to see the same folder, as with any output_dir."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]  # without credentials, which url_problem refuses
    root = Path(os.environ.get("SAMECURVE_STAGING") or "runs").expanduser()
    # a key of a store may have "..", which as a path would leave the root
    return root.joinpath(parts.scheme, place, *(part for part in parts.path.split("/") if part not in ("", "..")))


def _reachable(value: Callable[[str], Any]) -> Iterator[Finding]:
    url = value("checkpoint.mirror")
    problem = url_problem(url) if url is not None else ""
    if problem:
        yield "checkpoint.mirror", problem


def _file_names(value: Callable[[str], Any]) -> Iterator[Finding]:
    longest = max((len(os.fsencode(part)) for part in Path(value("output_dir")).parts), default=0)
    if longest > LONGEST_NAME:
        yield (
            "output_dir",
            f"a name in it has {longest} bytes, but file systems take {LONGEST_NAME}; shorten it",
        )


RULES = (_reachable, _file_names)
