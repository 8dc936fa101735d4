"""Files to text, and tables (JSON lines, JSON, parquet, csv) to rows with places. DataError where one is broken."""

from __future__ import annotations

import codecs
import contextlib
import csv
import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from samecurve.errors import DataError
from samecurve.specs.file_kinds import COMPRESSED, table_kind

_BOM = codecs.BOM_UTF8
_TAIL_BYTES = 1 << 16
_LARGEST_FIELD = 2**31 - 1  # bytes; csv's own limit of 128 KiB is less than some documents have


def read_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """(place, row) of every row of a table: the place is what a message names, `file:line` or `file: row N`."""
    return _READERS[table_kind(file)](file)


def read_last_row(file: Path) -> Iterator[tuple[str, dict]]:
    """(place, row) of a jsonl file's last line, which is where a copy that broke off shows; nothing of other files."""
    if table_kind(file) != "jsonl" or file.suffix.lower() in COMPRESSED:
        return
    tail, start, size = b"", (end := file.stat().st_size), _TAIL_BYTES
    try:
        with open(file, "rb") as stream:
            while start and b"\n" not in tail.strip():
                start, size = max(0, start - size), 2 * size
                stream.seek(start)
                tail = stream.read(end - start)
    except OSError as error:
        raise unreadable(file, error) from error
    before, _, line = tail.rstrip().rpartition(b"\n")
    if line:
        place = f"{file}: the last line"
        ended = tail[len(tail.rstrip()) :]
        yield place, parse_row(lambda _: place, line + ended, start + len(before) + bool(before))


def read_text(file: Path) -> str:
    """A whole file of UTF-8, also a compressed one. DataError where it cannot be read."""
    if file.suffix.lower() in COMPRESSED:
        return _decode(_counted(file, 1), b"".join(_lines(file)), 0)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error
    return _decode(_counted(file, 1), data, 0)


def unreadable(file: object, error: Exception) -> DataError:
    """The error for a file that cannot be opened or read to its end, with the fix where it is known."""
    reason = getattr(error, "strerror", None) or error
    fix = ""
    if isinstance(error, PermissionError):
        fix = "; give the user of this process permission to read it (chmod +r), or leave it out with data.pattern"
    return DataError(f"{file}: could not be read: {reason}{fix}")


def no_column(place: str, row: Iterable, missing: dict[str, str], wanted: str = "", fix: str = "") -> DataError:
    """The error for a row without columns that are looked for. missing: key of the recipe's data -> column.

    wanted: what the message says is missing, default: the columns. fix: what to do where no column has a similar name.
    """
    found = [str(name) for name in row]
    near = {key: difflib.get_close_matches(name, found, n=1, cutoff=0.6) for key, name in missing.items()}
    guesses = " ".join(f"data.{key}={names[0]}" for key, names in near.items() if names)
    fix = f"did you mean {guesses}?" if guesses else fix or f"set {' and '.join(f'data.{key}' for key in missing)}"
    wanted = wanted or " and ".join(map(repr, missing.values()))
    return DataError(f"{place}: no column {wanted}, found: {', '.join(found) or 'nothing'}; {fix}")


def check_characters(place: str, column: str, text: str) -> None:
    r"""JSON can spell half a character (`"\ud83d"`, an emoji cut in two), which no tokenizer and no hash takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {column!r} holds half a surrogate pair, {text[error.start]!a}, at character {error.start}; "
            "correct or remove the row"
        ) from error


def parse_row(at: Callable[[int], str], line: bytes, offset: int) -> dict:
    """A line of a jsonl file. at: what a message names, of the line as counted from this one. offset: in bytes."""
    text = _decode(at, line, offset)
    row = _parse_json(at, text.rstrip("\r\n"), text.endswith("\n"))
    if not isinstance(row, dict):
        raise DataError(f'{at(0)}: {row!r:.40} is not a JSON object; write {{"column": ...}}, one per line')
    return row


def _json_lines(file: Path) -> Iterator[tuple[str, dict]]:
    """Parsed here and not by datasets, which gives up where a column that nobody reads changes its type on the way."""
    offset = 0
    for number, line in enumerate(_lines(file), start=1):
        if line.strip():
            yield f"{file}:{number}", parse_row(_counted(file, number), line, offset)
        offset += len(line)


def _json_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """One array of objects, or lines. datasets would give lists of objects with different keys as text."""
    first = next((line for line in _lines(file) if line.strip(b" \t\r\n" + _BOM)), b"")
    if not first.removeprefix(_BOM).lstrip().startswith(b"["):
        _check_lines(file, first)
        yield from _json_lines(file)
        return
    text = _decode(_counted(file, 1), b"".join(_lines(file)), 0)
    found = _parse_json(_counted(file, 1), text, text.endswith("\n"))
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{file}: row {number}: {row!r:.40} is not a JSON object; correct or remove it")
        yield f"{file}: row {number}", row


def _check_lines(file: Path, first: bytes) -> None:
    """DataError for a file that is one object over several lines, such as {"data": [...]}."""
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(first.removeprefix(_BOM))
        return
    try:
        whole = json.loads(b"".join(_lines(file)).removeprefix(_BOM))
    except (ValueError, RecursionError):
        return  # whatever is wrong is told of its line
    if not isinstance(whole, dict):
        return
    rows = [key for key, value in whole.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    raise DataError(
        f"{file}: is one JSON object ({', '.join(map(repr, whole))}) over several lines, not rows; write a list of "
        "objects, or one object per line" + (f": the list of {rows[0]!r} alone would do" if rows else "")
    )


def _csv_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """All values are text, as they stand there: pandas, which datasets reads csv by, makes numbers, truth values and
    nothing ("NA", "None") of them, and whether it does depends on the column's other rows."""
    csv.field_size_limit(_LARGEST_FIELD)
    reader = csv.reader(_decoded(file), strict=True)
    columns: list[str] | None = None
    last = 0
    while True:
        place = f"{file}:{last + 1}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{place}: not csv: {error}; correct or remove the row") from error
        last = reader.line_num
        if fields is None:
            return
        if not fields:  # an empty line
            continue
        if columns is None:
            columns = _header(place, fields)
        elif len(fields) == len(columns):
            yield place, dict(zip(columns, fields, strict=True))
        else:
            raise DataError(
                f"{place}: has {len(fields)} fields and the header {len(columns)}; correct the row, or quote the field "
                "that holds a comma or a line break"
            )


def _header(place: str, columns: list[str]) -> list[str]:
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{place}: two columns are named {twice!r}; rename or remove one")
    return columns


def _decoded(file: Path) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(_lines(file), start=1):
        yield _decode(_counted(file, number), line, offset)
        offset += len(line)


def _counted(file: Path, first_line: int) -> Callable[[int], str]:
    return lambda nth: f"{file}:{first_line + nth}"


def _lines(file: Path) -> Iterator[bytes]:
    import fsspec

    try:
        with fsspec.open(str(file), "rb", compression="infer") as lines:
            yield from lines
    except MemoryError:
        raise
    except Exception as error:  # Each codec has errors of its own.
        raise unreadable(file, error) from error


def _decode(at: Callable[[int], str], data: bytes, offset: int) -> str:
    """A byte-order mark, which spreadsheets and editors of Windows write, is not part of a file's text."""
    begin = len(_BOM) if offset == 0 and data.startswith(_BOM) else 0
    try:
        return data[begin:].decode()
    except UnicodeDecodeError as error:
        value, line = error.object[error.start], error.object.count(b"\n", 0, error.start)
        raise DataError(
            f"{at(line)}: byte {offset + begin + error.start} (0x{value:02x}) is not UTF-8: {error.reason}; "
            "convert the file (iconv -f latin1 -t utf-8) or leave it out with data.pattern"
        ) from error


def _parse_json(at: Callable[[int], str], text: str, ended: bool) -> Any:
    """ended: whether a line break was behind the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut_off = error.pos >= len(text.rstrip()) or not ended
        fix = "is the end of the file cut off? Correct or remove the line" if cut_off else "correct or remove the line"
        raise DataError(f"{at(error.lineno - 1)}: column {error.colno}: not JSON: {error.msg}; {fix}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise DataError(f"{at(0)}: not JSON that can be read: {error}; remove the line") from error


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict]]:
    import datasets  # Two seconds, and not needed when the tokens are cached already.

    number = 0
    try:
        # One file at a time: datasets casts all files of a call to the first one's columns, read or not.
        rows = datasets.load_dataset("parquet", data_files=[str(file)], split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{file}: row {number}", row
    except PermissionError as error:
        raise unreadable(file, error) from error
    except MemoryError:  # pyarrow's is one: nothing is wrong with the file
        raise
    except Exception as error:  # datasets passes on whatever pyarrow or a codec raised.
        raise DataError(f"{file}: after row {number}: {error}; check that the file is whole parquet") from error


_READERS = {"jsonl": _json_lines, "json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}
