"""Files to text, and tables (JSON lines, JSON, parquet, csv) to rows with places. DataError where one is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DataError

TABLES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
COMPRESSED = frozenset((".gz", ".zst", ".bz2", ".xz"))


def table_kind(file: Path) -> str | None:
    """How a table is read, None for a text. `.jsonl.gz` and the like are tables too."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return TABLES.get(suffixes[-1]) if suffixes else None


def rows(file: Path) -> Iterator[tuple[str, dict]]:
    """(place, row) of every row of a table: the place is what a message names, `file:line` or `file: row N`."""
    kind = table_kind(file)
    read = {"jsonl": _json_lines, "json": _json_rows}.get(kind)
    return read(file) if read else _dataset_rows(file, kind)


def read_text(file: Path) -> str:
    """A whole file of UTF-8. DataError where it cannot be read."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: could not be read: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(_bad_utf8(file, data.count(b"\n", 0, error.start) + 1, error.start, error)) from error


def check_characters(place: str, column: str, text: str) -> None:
    r"""JSON can spell half a character (`"\ud83d"`, an emoji cut in two), which no tokenizer and no hash takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {column!r} holds half a surrogate pair, {text[error.start]!a}, at character {error.start}; "
            "correct or remove the row"
        ) from error


def _json_lines(file: Path) -> Iterator[tuple[str, dict]]:
    """Parsed here and not by datasets, which gives up where a column that nobody reads changes its type on the way."""
    offset = 0
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield f"{file}:{number}", _parse(file, number, offset, line)
        offset += len(line)


def _json_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """One array of objects, or lines. datasets would give lists of objects with different keys as text."""
    first = next((line for line in _lines(file) if line.strip()), b"")
    if not first.lstrip().startswith(b"["):
        yield from _json_lines(file)
        return
    found = _parse_json(file, 1, 0, b"".join(_lines(file)))
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{file}: row {number}: {row!r:.40} is not a JSON object; correct or remove it")
        yield f"{file}: row {number}", row


def _lines(file: Path) -> Iterator[bytes]:
    import fsspec

    try:
        with fsspec.open(str(file), "rb", compression="infer") as lines:
            yield from lines
    except Exception as error:  # Each codec has errors of its own.
        raise DataError(f"{file}: could not be read: {error}") from error


def _parse(file: Path, number: int, offset: int, line: bytes) -> dict:
    row = _parse_json(file, number, offset, line)
    if not isinstance(row, dict):
        raise DataError(f'{file}:{number}: {row!r:.40} is not a JSON object; write {{"column": ...}}, one per line')
    return row


def _parse_json(file: Path, first_line: int, offset: int, data: bytes) -> Any:
    """first_line: of the file, where data begin; offset: in bytes."""
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        number = first_line + data.count(b"\n", 0, error.start)
        raise DataError(_bad_utf8(file, number, offset + error.start, error)) from error
    except json.JSONDecodeError as error:
        place = f"{file}:{first_line + error.lineno - 1}: column {error.colno}"
        cut_off = error.pos >= len(error.doc.rstrip()) or not data.endswith(b"\n")
        fix = "is the end of the file cut off? Correct or remove the line" if cut_off else "correct or remove the line"
        raise DataError(f"{place}: not JSON: {error.msg}; {fix}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise DataError(f"{file}:{first_line}: not JSON that can be read: {error}; remove the line") from error


def _dataset_rows(file: Path, kind: str) -> Iterator[tuple[str, dict]]:
    import datasets  # Two seconds, and not needed when the tokens are cached already.

    number = 0
    try:
        # One file at a time: datasets casts all files of a call to the first one's columns, read or not.
        rows = datasets.load_dataset(kind, data_files=[str(file)], split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{file}: row {number}", row
    except Exception as error:  # datasets passes on whatever pyarrow, pandas or a codec raised.
        raise DataError(f"{file}: after row {number}: {error}; check that the file is whole {kind}") from error


def _bad_utf8(file: Path, line: int, offset: int, error: UnicodeDecodeError) -> str:
    value = error.object[error.start]
    return (
        f"{file}:{line}: byte {offset} (0x{value:02x}) is not UTF-8: {error.reason}; "
        "convert the file (iconv -f latin1 -t utf-8) or leave it out with data.pattern"
    )
