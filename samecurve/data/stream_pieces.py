"""Streamed files, local or behind a URL, and chunks of them. Each chunk can be read without the others.

The chunks follow from the files' names and sizes (and parquet footers), so no data are read ahead. Names in the code
call a chunk a piece, too.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from samecurve.data import hub, sources
from samecurve.data.columns import Columns
from samecurve.data.formats import parse_row, read_text, table_rows
from samecurve.data.opening import LONGEST_ROW, lines_of, marked_encoding, too_long, unreadable
from samecurve.data.sampler import rows_in_steps
from samecurve.errors import DataError
from samecurve.specs.data_names import COMPRESSED, Address, address, is_text, table_kind
from samecurve.storage.cache import digest
from samecurve.storage.checksums import POINTER_BYTES

_PIECES_PER_BLOCK = 16
_FOOTERS_AT_ONCE = 16


@dataclass(frozen=True)
class FileChunk:
    """A part of a file, or several small text files; holds whole documents.

    Attributes:
        kind: key of _READERS.
        files: file of the chunk, or several text files.
        start: first byte or row group; 0 for text and compressed files.
        stop: end of the bytes or row groups; number of files for text and compressed files.
        num_bytes: approximate size.
    """

    kind: str
    files: tuple[StreamFile, ...]
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class ChunkSource(sources.DataSource):
    """Documents of some chunks, in order. Rows are checked only when they are read."""

    pieces: tuple[FileChunk, ...] = ()
    quiet: ClassVar[bool] = True

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def check(self) -> Columns:
        """Check nothing: no data are read ahead."""
        return Columns()

    def entries(self) -> Iterator[str]:
        for piece in self.pieces:
            for place, row in _READERS[piece.kind](piece, self.text_column):
                yield row if isinstance(row, str) else sources.text_of(place, row, self.text_column)


class ShuffleBlocks:
    """Blocks of chunks, which are tokenised and shuffled together. Each epoch has its own random order of chunks.

    The chunks of a block are a pure function of (seed, block); blocks are counted over all epochs. The blocks of an
    epoch differ by at most one chunk in size. The first block of an epoch shares no chunk with the last block of the
    epoch before, so no step reads a text twice if its rows fit into a block. If an epoch is a single block, all epochs
    read the same chunks.
    """

    def __init__(self, pieces: Sequence[FileChunk], buffer_bytes: float, seed: int):
        self._pieces, self._seed = pieces, seed
        mean = sum(piece.num_bytes for piece in pieces) / len(pieces)
        self.per_epoch = -(-len(pieces) // max(1, round(buffer_bytes / max(mean, 1))))
        self._joints = _Joints(len(pieces), len(pieces) - self._start(self.per_epoch - 1), self._start(1))

    def __getitem__(self, block: int) -> tuple[FileChunk, ...]:
        epoch, nth = divmod(block, self.per_epoch)
        places = np.arange(self._start(nth), self._start(nth + 1))
        positions = epoch * len(self._pieces) + places
        return tuple(self._pieces[i] for i in rows_in_steps(positions, len(self._pieces), self._seed, self._joints))

    def _start(self, nth: int) -> int:
        return nth * len(self._pieces) // self.per_epoch


@dataclass(frozen=True)
class _Joints:
    """Bounds (see sampler.Bounds) that treat the joint of two epochs as a step.

    Attributes:
        num_pieces: number of chunks of an epoch.
        before: number of chunks in an epoch's last block.
        after: number of chunks in an epoch's first block.
    """

    num_pieces: int
    before: int
    after: int
    since: int = 0
    earlier: None = None

    def bounds(self, position: int) -> tuple[int, int]:
        epoch = position // self.num_pieces
        assert position == epoch * self.num_pieces  # the order asks for the beginnings of epochs only
        return position - (self.before if epoch else 0), position + self.after


def cut_into_chunks(files: Sequence[StreamFile], buffer_bytes: float) -> list[FileChunk]:
    """Cut files into chunks of about 1/16 of the buffer. A compressed file or a parquet row group is one chunk."""
    wanted = max(1, int(buffer_bytes / _PIECES_PER_BLOCK))
    kinds = []
    for path in (Path(file.name) for file in files):
        kind = table_kind(path) or "text"
        if kind == "jsonl":
            kind = "compressed" if path.suffix.lower() in COMPRESSED else "lines"
        kinds.append(kind)
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:  # each footer of a remote file is a request
        parquet = [file for file, kind in zip(files, kinds, strict=True) if kind == "parquet"]
        groups = dict(zip(parquet, pool.map(_row_groups, parquet), strict=True))
    pieces: list[FileChunk] = []
    texts: list[StreamFile] = []
    collected = 0
    for file, kind in zip(files, kinds, strict=True):
        if kind == "text":
            texts.append(file)
            collected += file.size
            if collected >= wanted:
                pieces.append(_text_piece(texts))
                texts, collected = [], 0
        elif kind == "lines":
            starts = range(0, file.size, wanted)
            stops = [min(start + wanted, file.size) for start in starts]
            pieces += [FileChunk(kind, (file,), *ends, ends[1] - ends[0]) for ends in zip(starts, stops, strict=True)]
        else:
            sizes = groups.get(file, [file.size])
            pieces += [FileChunk(kind, (file,), nth, nth + 1, size) for nth, size in enumerate(sizes)]
    return pieces + ([_text_piece(texts)] if texts else [])


def fingerprint(files: Sequence[StreamFile]) -> str:
    """Return a digest of the files' relative names and sizes, so that a copy of the same files is the same data."""
    return digest([(file.relative, file.size) for file in files])


def _text_piece(texts: list[StreamFile]) -> FileChunk:
    return FileChunk("text", tuple(texts), 0, len(texts), sum(text.size for text in texts))


def opened_rows(file: StreamFile, read: Callable[[Any], Iterator]) -> Iterator:
    """Yield from `read(open file)`. Raises DataError for any error while reading."""
    import fsspec

    try:
        with fsspec.open(file.name, "rb") as stream:
            yield from read(stream)
    except DataError:
        raise
    except Exception as error:  # each kind of file system raises its own errors
        raise unreadable(file.name, error) from error


def _row_groups(file: StreamFile) -> list[int]:
    import pyarrow.parquet

    def sizes(stream) -> Iterator[int]:
        metadata = pyarrow.parquet.read_metadata(stream)
        yield from (metadata.row_group(nth).total_byte_size for nth in range(metadata.num_row_groups))

    return list(opened_rows(file, sizes))


def _lines(piece: FileChunk, column: str) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a jsonl chunk. A line belongs to the chunk that contains its first byte."""
    file = piece.files[0]

    def read(opened) -> Iterator[tuple[str, dict]]:
        stream = io.BufferedReader(opened)  # fsspec's own buffer has no limit for a line
        offset = piece.start
        if offset:
            # from the byte before, because a line that begins exactly here belongs to this chunk
            stream.seek(offset - 1)
            while (rest := stream.readline(LONGEST_ROW)) and not rest.endswith(b"\n") and stream.tell() < piece.stop:
                pass
            offset = stream.tell()
        while offset < piece.stop and (line := stream.readline(LONGEST_ROW + 1)):
            place = f"{file.name}: byte {offset}"
            if len(line) > LONGEST_ROW:
                raise too_long(place)
            if line.strip():
                try:
                    row = parse_row(lambda _, place=place: place, line, offset)
                except DataError:
                    stream.seek(0)
                    if encoding := marked_encoding(file.name, stream.read(POINTER_BYTES)):
                        raise DataError(
                            f"{file.name}: {encoding} by its byte-order mark, but data.streaming reads parts of a "
                            f"jsonl file only in UTF-8; convert it (iconv -f {encoding} -t UTF-8 NAME), compress it, "
                            "or set data.streaming=false"
                        ) from None
                    raise
                yield place, row
            offset += len(line)

    return opened_rows(file, read)


def _compressed(piece: FileChunk, column: str) -> Iterator[tuple[str, dict]]:
    name, offset = piece.files[0].name, 0
    for number, line in enumerate(lines_of(name, LONGEST_ROW), start=1):
        place = f"{name}:{number}"
        if line.strip():
            yield place, parse_row(lambda _, place=place: place, line, offset)
        offset += len(line)


def _row_group(piece: FileChunk, column: str) -> Iterator[tuple[str, dict]]:
    import pyarrow.parquet

    file = piece.files[0]

    def read(stream) -> Iterator[tuple[str, dict]]:
        table = pyarrow.parquet.ParquetFile(stream)
        known = table.schema_arrow.names
        columns = [column] if column in known else known  # for the error message, which names the existing columns
        place = f"{file.name}: row group {piece.start}"
        for number, row in enumerate(table_rows(place, table, [piece.start], columns), start=1):
            yield f"{place}, row {number}", row

    return opened_rows(file, read)


def _texts(piece: FileChunk, column: str) -> Iterator[tuple[str, str]]:
    return ((file.name, read_text(file.name)) for file in piece.files)


_READERS = {"lines": _lines, "compressed": _compressed, "parquet": _row_group, "text": _texts}


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
        files = []
        for file in sources.find_source(name, pattern, text_column, selection).local_files:
            try:
                stat = file.stat()
                open(file, "rb").close()  # report an unreadable file now, not at the block that reads it
            except OSError as error:
                raise unreadable(file, error) from error
            version = f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
            files.append(StreamFile(str(file), os.path.relpath(file, below), stat.st_size, version))
    whole = [file.name for file in files if table_kind(Path(file.name)) in ("json", "csv", "tsv", "arrow")]
    if whole:
        raise DataError(
            f"{whole[0]}: data.streaming reads only text, jsonl (also compressed) and parquet; convert the file, "
            "choose other files with data.pattern, or set data.streaming=false"
        )
    return tuple(files)


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
