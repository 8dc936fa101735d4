"""Readers of text files and of tables (JSON lines, JSON, parquet, csv). Raise DataError for a broken file."""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.data.opening import CONVERT, LONGEST_ROW, lines_of, marked_encoding, too_long, unreadable
from samecurve.errors import DataError
from samecurve.specs.data_names import COMPRESSED, table_kind
from samecurve.specs.row_formats import CHAT, MATCHES, PAIRS, fitting
from samecurve.storage.checksums import POINTER_BYTES, pointer_problem

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyarrow.parquet import ParquetFile

_BOM = codecs.BOM_UTF8
ROWS_AT_ONCE = 32  # of a parquet file: so many of LONGEST_ROW fit into one of Arrow's arrays of text
_TAIL_BYTES = 1 << 16


def read_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """Yield (place, row) for every row of a table. Raises DataError as `rows_or_errors` and for its errors."""
    for place, row in rows_or_errors(file):
        if isinstance(row, DataError):
            raise row
        yield place, row


def rows_or_errors(file: Path) -> Iterator[tuple[str, dict | DataError]]:
    """Yield (place, row) for every row of a table, with the error in the place of a row that cannot be parsed.

    The place, for messages, is `file:line` or `file: row N`. Raises DataError where the file cannot be read further.
    """
    kind = table_kind(file)
    assert kind is not None, file
    try:
        yield from _READERS[kind](file)
    except MemoryError as error:  # while a row is parsed
        raise unreadable(file, error) from error


def read_last_row(file: Path) -> Iterator[tuple[str, dict]]:
    """Yield (place, row) for the last line of a jsonl file, which shows a truncated copy.

    Yields nothing for other files, compressed ones and those in UTF-16 or UTF-32.
    """
    if table_kind(file) != "jsonl" or file.suffix.lower() in COMPRESSED:
        return
    tail, start, size = b"", (end := file.stat().st_size), _TAIL_BYTES
    try:
        with open(file, "rb") as stream:
            if marked_encoding(str(file), stream.read(POINTER_BYTES)):
                return
            while start and b"\n" not in tail.strip() and len(tail) <= LONGEST_ROW:
                start, size = max(0, start - size), 2 * size
                stream.seek(start)
                tail = stream.read(end - start)
    except OSError as error:
        raise unreadable(file, error) from error
    before, _, line = tail.rstrip().rpartition(b"\n")
    place = f"{file}: the last line"
    if len(line) > LONGEST_ROW:
        raise too_long(place)
    if line:
        # parse_row concludes from the line break that the line is complete
        ended = tail[len(tail.rstrip()) :]
        yield place, parse_row(lambda _: place, line + ended, start + len(before) + bool(before))


def read_text(file: Path | str) -> str:
    """Read a whole text file, see `opening.lines_of`. Raises DataError if it cannot be read."""
    try:
        return _decode(_counted(file, 1), b"".join(lines_of(file)), 0)
    except MemoryError as error:
        raise unreadable(file, error) from error


def no_column(place: str, row: Iterable, wanted: str, fix: str = "add it, or remove the row") -> DataError:
    """Return the error for a row without the wanted columns, of which other rows may know nothing."""
    return DataError(f"{place}: no column {wanted}, found: {', '.join(map(str, row)) or 'nothing'}; {fix}")


def check_characters(place: str, column: str, text: str) -> None:
    """Raise DataError for a text with a lone surrogate."""
    # JSON can spell one (`"\ud83d"`, an emoji cut in two), but no tokenizer and no hash accepts it.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {column!r} has a lone surrogate, {text[error.start]!a}, at character {error.start}, which UTF-8 "
            "cannot encode; correct or remove the row"
        ) from error


def parse_row(at: Callable[[int], str], line: bytes, offset: int) -> dict:
    """Parse a line of a jsonl file. Raises DataError for a line that is not UTF-8 or not a JSON object.

    Args:
        at: returns the place, for messages, of the n-th line after this one.
        line: the line with its line break.
        offset: bytes of the file before the line.
    """
    text = _decode(at, line, offset)
    row = _parse_json(at, text.rstrip("\r\n"), text.endswith("\n"))
    if not isinstance(row, dict):
        raise DataError(f'{at(0)}: {row!r:.40} is not a JSON object; write {{"column": ...}}, one per line')
    return row


def _json_lines(file: Path) -> Iterator[tuple[str, dict | DataError]]:
    """Yield the rows of a jsonl file."""
    # Not read by datasets, which fails if a column changes its type between rows, even an unused one.
    offset = 0
    for number, line in enumerate(lines_of(file, LONGEST_ROW), start=1):
        if line.strip():
            try:
                row = parse_row(_counted(file, number), line, offset)
            except DataError as error:
                row = error
            yield f"{file}:{number}", row
        offset += len(line)


def _json_rows(file: Path) -> Iterator[tuple[str, dict | DataError]]:
    """Yield the rows of a JSON file: one array of objects, one object that holds the array, or JSON lines."""
    # Not read by datasets, which returns lists of objects with different keys as text.
    first = next((line for line in lines_of(file) if line.strip(b" \t\r\n" + _BOM)), b"")
    if first.removeprefix(_BOM).lstrip().startswith(b"["):
        text = _decode(_counted(file, 1), b"".join(lines_of(file)), 0)
        rows, name = _parse_json(_counted(file, 1), text, text.endswith("\n")), ""
    else:
        rows, name = _list_in_object(file, first)
        if rows is None:
            yield from _json_lines(file)
            return
    for number, row in enumerate(rows, start=1):
        place = f"{file}: {name}row {number}"
        is_row = isinstance(row, dict)
        yield place, row if is_row else DataError(f"{place}: {row!r:.40} is not a JSON object; correct or remove it")


def _list_in_object(file: Path, first: bytes) -> tuple[list | None, str]:
    """Return (rows, the name of their list) of a file that is one object; (None, "") for JSON lines.

    An object on a single line may be a row itself, which is read as such if its columns say so.

    Raises DataError for one over several lines without a list of rows, or with several lists.
    """
    is_line = False
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(first.removeprefix(_BOM))
        is_line = True
    if is_line and len(list(islice(filter(bytes.strip, lines_of(file)), 2))) > 1:
        return None, ""
    try:
        whole = json.loads(b"".join(lines_of(file)).removeprefix(_BOM))
    except (ValueError, RecursionError):
        return None, ""  # _json_lines reports the error with its line
    if not isinstance(whole, dict):
        return None, ""
    lists = {key: value for key, value in whole.items() if isinstance(value, list) and value}
    rows = [k for k, v in lists.items() if all(isinstance(e, dict) and not {"role", "from"} & e.keys() for e in v)]
    is_row = is_line and ("text" in whole or any(fitting(whole, tasks) for tasks in (CHAT, PAIRS, MATCHES)))
    if rows and len(lists) == 1 and not is_row:
        return lists[rows[0]], f"{rows[0]} "
    if is_line:
        return None, ""
    fix = f"keep one of the lists, such as {rows[0]!r}" if rows else "put the object between [ and ] if it is one row"
    raise DataError(
        f"{file}: the file is one JSON object (keys {', '.join(map(repr, whole))}) over several lines, not a list of "
        f"rows or an object with one such list; write a list of objects, or one object per line: {fix}"
    )


def _csv_rows(file: Path, delimiter: str = ",") -> Iterator[tuple[str, dict | DataError]]:
    """Yield the rows of a csv or tsv file, with all values as text."""
    # Not read by datasets: its reader, pandas, converts values to numbers, booleans and None ("NA", "None"), depending
    # on the column's other rows.
    csv.field_size_limit(LONGEST_ROW)  # some documents exceed the default, 128 KiB
    columns: list[str] | None = None
    last = 0
    lines = _RowLines(_decoded(file))
    reader = csv.reader(lines, strict=True, delimiter=delimiter)  # otherwise csv accepts misplaced quotes silently
    while True:
        place = lines.begin(f"{file}:{last + 1}")
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{place}: the row is not valid {table_kind(file)}: {error}; correct or remove it"
            ) from error
        last = reader.line_num
        if fields is None:
            return
        if not fields:  # an empty line
            continue
        if columns is None:
            columns = fields
            twice = next((name for name in columns if columns.count(name) > 1), None)
            if twice is not None:
                raise DataError(f"{place}: two columns are named {twice!r}; rename or remove one")
        elif len(fields) == len(columns):
            yield place, dict(zip(columns, fields, strict=True))
        else:
            yield (
                place,
                DataError(
                    f"{place}: the row has {len(fields)} fields, but the header has {len(columns)}; correct the row, "
                    "or quote the field that contains a separator or a line break"
                ),
            )


class _RowLines:
    """The lines of a file. Raises DataError where those of one row exceed LONGEST_ROW, as after a missing quote."""

    def __init__(self, lines: Iterable[str]):
        self._lines, self._place, self._length = lines, "", 0

    def begin(self, place: str) -> str:
        self._place, self._length = place, 0
        return place

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self._length += len(line)
            if self._length > LONGEST_ROW:
                raise too_long(self._place)
            yield line


def _decoded(file: Path) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(lines_of(file, LONGEST_ROW), start=1):
        yield _decode(_counted(file, number), line, offset)
        offset += len(line)


def _counted(file: Path | str, first_line: int) -> Callable[[int], str]:
    return lambda nth: f"{file}:{first_line + nth}"


def _decode(at: Callable[[int], str], data: bytes, offset: int) -> str:
    """Decode UTF-8 without the byte-order mark that spreadsheets and editors of Windows write."""
    begin = len(_BOM) if offset == 0 and data.startswith(_BOM) else 0
    try:
        return data[begin:].decode()
    except UnicodeDecodeError as error:
        value, line = error.object[error.start], error.object.count(b"\n", 0, error.start)
        raise DataError(
            f"{at(line)}: byte {offset + begin + error.start} (0x{value:02x}) is not UTF-8: {error.reason}; {CONVERT}"
        ) from error


def _parse_json(at: Callable[[int], str], text: str, ended: bool) -> Any:
    """Parse JSON. `ended`: whether a line break followed the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut_off = error.pos >= len(text.rstrip()) or not ended
        fix = "correct or remove the line" + (" (is the file truncated here?)" if cut_off else "")
        raise DataError(f"{at(error.lineno - 1)}: invalid JSON at column {error.colno}: {error.msg}; {fix}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise DataError(f"{at(0)}: this JSON cannot be read: {error}; remove the line") from error


def without_nulls(row: dict) -> dict:
    """Remove the null fields of all objects within a row's columns, at any depth; entries of lists stay.

    Arrow gives each object the fields of all objects of its column, null where a row lacks them. The rule is TRL's
    (remove_none_values in trl/data_utils.py), except that a column of the row stays.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(part) for key, part in value.items() if part is not None}
        return [clean(part) for part in value] if isinstance(value, list) else value

    return {column: clean(value) for column, value in row.items()}


def _numbered(file: Path, rows: Iterable[dict]) -> Iterator[tuple[str, dict]]:
    """Yield (place, row) for the rows that pyarrow reads. Raises DataError if the file cannot be read to its end."""
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield f"{file}: row {number}", without_nulls(row)
    except DataError:
        raise
    except (PermissionError, MemoryError) as error:
        raise unreadable(file, error) from error
    except Exception as error:  # any error of pyarrow or a codec
        problem = f"{file}: error after row {number}: {error}; check that the file is complete"
        raise DataError(pointer_problem(str(file)) or problem) from error


def parquet_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a parquet file. Raises DataError if it cannot be read to its end."""
    import pyarrow.parquet

    def rows() -> Iterator[dict]:
        with pyarrow.parquet.ParquetFile(file) as table:
            yield from table_rows(str(file), table, range(table.num_row_groups))

    return _numbered(file, rows())


def _arrow_rows(file: Path) -> Iterator[tuple[str, dict]]:
    """Yield the rows of an Arrow file, a stream or not. Raises DataError if it cannot be read to its end."""
    import pyarrow

    def rows() -> Iterator[dict]:
        with pyarrow.memory_map(str(file)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file:
                reader = pyarrow.ipc.open_file(source)
                batches: Iterable = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                batches = reader = pyarrow.ipc.open_stream(source)
            decode, number = _hub_decoder(reader.schema), 0
            for batch in batches:
                for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                    some = batch.slice(start, ROWS_AT_ONCE)
                    _check_lengths(str(file), number + start, some)
                    yield from map(decode, some.to_pylist())
                number += batch.num_rows

    return _numbered(file, rows())


def table_rows(name: str, table: ParquetFile, groups: Iterable[int], columns: Sequence[str] | None = None) -> Iterator:
    """Yield the rows of row groups as dicts. Few are in memory at a time: Arrow's arrays of text end at 2 GiB.

    Not read by datasets, which takes 12 seconds for 200,000 short rows where pyarrow takes 0.8 (2 cores, pyarrow 26.0).
    Only its JSON columns need its decoder.

    Raises:
        DataError: for a row of more than LONGEST_ROW.
    """
    decode = _hub_decoder(table.schema_arrow)
    number = 0
    for group in groups:
        facts = table.metadata.row_group(group)
        chunks = [facts.column(index) for index in range(facts.num_columns)]
        largest = max((max(chunk.total_uncompressed_size, chunk.num_values) for chunk in chunks), default=0)
        if largest > LONGEST_ROW * max(facts.num_rows, 1):  # refused before it is unpacked
            raise too_long(f"{name}: row {number + 1}")
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns, use_threads=False):
            _check_lengths(name, number, batch)
            number += batch.num_rows
            yield from map(decode, batch.to_pylist())


def _check_lengths(name: str, number: int, batch: RecordBatch) -> None:
    """Raise DataError for a row of more than LONGEST_ROW. number: of the rows before the batch."""
    if batch.nbytes <= LONGEST_ROW:
        return
    for nth in range(batch.num_rows):
        cells = (column.slice(nth, 1) for column in batch.columns)
        # of a dictionary-coded column (pandas' categories) only the row's value counts
        cells = (cell.dictionary_decode() if hasattr(cell, "dictionary_decode") else cell for cell in cells)
        if sum(cell.nbytes for cell in cells) > LONGEST_ROW:
            raise too_long(f"{name}: row {number + nth + 1}")


def _hub_decoder(schema: Schema) -> Callable[[dict], dict]:
    """Return the decoder of rows that datasets wrote with its type Json, at any depth; else the identity."""
    written = (schema.metadata or {}).get(b"huggingface", b"")
    if b'"Json"' not in written:
        return lambda row: row
    from datasets import Features

    return Features.from_arrow_schema(schema).decode_example


_READERS = {"jsonl": _json_lines, "json": _json_rows, "csv": _csv_rows, "parquet": parquet_rows, "arrow": _arrow_rows}
_READERS |= {"tsv": partial(_csv_rows, delimiter="\t")}
