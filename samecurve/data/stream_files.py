"""Files of a stream: local, behind a URL, or of one split of a hub data set. No file is read whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from samecurve.data import hub, sources
from samecurve.data.opening import unreadable
from samecurve.errors import DataError
from samecurve.specs.data_names import Address, address, is_text, table_kind

_VERSIONS = ("ETag", "etag", "blob_id", "mtime", "created")  # keys of the version in different file systems


class StreamFile(NamedTuple):
    """One file of a stream.

    Attributes:
        name: path or URL for fsspec.
        relative: path relative to the data's folder.
        size: bytes.
        version: changes when the content does.
    """

    name: str
    relative: str
    size: int
    version: str


def find_stream_files(
    name: str, pattern: str | None, text_column: str, selection: sources.Selection = sources.WHOLE
) -> tuple[StreamFile, ...]:
    """Find the files of `data.path`.

    For a hub data set (OWNER/NAME, hf://datasets/OWNER/NAME or a folder in it) these are the files of the selected
    split. A path of a single file there, or a pattern, selects files by name.

    Args:
        name: data.path: a local path, a hub data set, or a URL that fsspec supports (s3://, https://).
        pattern: glob within a folder, None for all data files.
        text_column: column of the text.
        selection: split, config and revision of a hub data set.

    Raises:
        DataError: as `sources.find_source` and `hub.hub_urls`, and when the URL cannot be listed.
    """
    where = address(name)
    if where is not None and not pattern and not where.is_file:
        files = _of_split(where, selection)
    elif where is not None and "://" not in name:
        files = _listed(f"hf://datasets/{name}" + (f"@{selection.revision}" if selection.revision else ""), pattern)
    elif "://" in name and not name.startswith("file://"):
        files = _listed(name, pattern)
    else:
        name = name.removeprefix("file://")
        root = Path(name).expanduser()
        below = root if root.is_dir() else root.parent
        files = [_local(file, below) for file in sources.find_source(name, pattern, text_column, selection).local_files]
    whole = [file.name for file in files if table_kind(Path(file.name)) in ("json", "csv", "tsv", "arrow")]
    if whole:
        raise DataError(
            f"{whole[0]}: data.streaming reads only text, jsonl (also compressed) and parquet; convert the file, "
            "choose other files with data.pattern, or set data.streaming=false"
        )
    return tuple(files)


def _local(file: Path, below: Path) -> StreamFile:
    try:
        stat = file.stat()
        open(file, "rb").close()  # report an unreadable file now, not at the block that reads it
    except OSError as error:
        raise unreadable(file, error) from error
    version = f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    return StreamFile(str(file), os.path.relpath(file, below), stat.st_size, version)


def _of_split(where: Address, selection: sources.Selection) -> list[StreamFile]:
    """Return the files of the selected split. Their names contain the commit, and so does the fingerprint."""
    from fsspec.core import url_to_fs

    files = []
    for url in hub.hub_urls(where, selection):
        if table_kind(Path(url)) not in ("jsonl", "json", "parquet"):
            raise DataError(
                f"{url}: data.streaming reads only the jsonl (also compressed) and parquet files of a hub data set; "
                "set data.streaming=false, or choose files with data.pattern"
            )
        try:
            system, path = url_to_fs(url)
            facts = system.info(path)
        except Exception as error:  # each kind of file system raises its own errors
            raise unreadable(url, error) from error
        files.append(StreamFile(url, url.removeprefix("hf://datasets/"), facts["size"], _version(facts)))
    return files


def _version(facts: dict[str, Any]) -> str:
    return next((str(facts[key]) for key in _VERSIONS if key in facts), "")


def _listed(url: str, pattern: str | None) -> list[StreamFile]:
    from fsspec.core import url_to_fs

    try:
        system, root = url_to_fs(url)
        if system.isfile(root):
            entries = {root: system.info(root)}
        elif pattern:
            entries = system.glob(f"{root}/{pattern}", detail=True)
        else:
            entries = system.find(root, detail=True)
    except (MemoryError, ImportError) as error:
        raise unreadable(url, error) from error
    except Exception as error:  # each kind of file system raises its own errors
        raise DataError(f"{url}: could not be listed: {error}; correct data.path, or check the access") from error
    # a single file is named relative to its folder, as a local one is
    below = root if len(entries) != 1 or root not in entries else os.path.dirname(root)
    files = []
    for name, facts in sorted(entries.items()):
        # a pattern selects files of any suffix; those without a known one are read as text
        wanted = pattern or table_kind(Path(name)) or is_text(Path(name))
        if facts["type"] == "file" and wanted:
            relative = os.path.relpath(name, below)
            files.append(StreamFile(system.unstrip_protocol(name), relative, facts["size"], _version(facts)))
    if not files:
        raise DataError(f"{url}: there is no text, jsonl or parquet file; correct data.path or data.pattern")
    return files
