"""Sources of documents: a file or folder of text or tables, a hub data set, or Python's standard library."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from samecurve.config.paths import path_problem, pattern_hint
from samecurve.data import hub
from samecurve.data.columns import Columns
from samecurve.data.formats import check_characters, no_column, read_last_row, read_text, rows_or_errors
from samecurve.data.opening import unreadable
from samecurve.data.row_checks import SHOWN_PROBLEMS, BadRow, BadRows, nearest, what_rows_are
from samecurve.data.selection import WHOLE, Selection, folder_files
from samecurve.errors import DataError, StorageError
from samecurve.specs.data_names import BUILTIN, is_hub_name, table_kind
from samecurve.storage.atomic import write_text
from samecurve.storage.cache import digest
from samecurve.storage.checksums import file_sha256

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

# encodings and pydoc_data belong to the library, but hold tables of characters and help pages instead of code.
_NOT_STDLIB = frozenset("test tests idlelib site-packages dist-packages __pycache__ encodings pydoc_data".split())
_RACY_SECONDS = 2.0
_CHECK_SECONDS = 10.0
_TRIED_ROWS = 20  # rows that a hint is tried on


@dataclass(frozen=True)
class DataSource:
    """Files in a fixed order, or a split of the hub.

    A document is any object whose str() is its content, whose length is the progress that is shown. A hash of its
    `split_key`, or of the content without one, decides whether it is held out.
    """

    name: str  # the path as the user wrote it
    files: tuple[Path | hub.Split, ...]
    text_column: str = "text"  # for tables
    selection: Selection = field(default=WHOLE, kw_only=True)
    quiet: ClassVar[bool] = False  # whether reading shows no progress
    columns_are_named_by: ClassVar[str] = "data.text_column"  # keys, for messages

    @property
    def local_files(self) -> tuple[Path, ...]:
        return tuple(file for file in self.files if isinstance(file, Path))

    @property
    def is_builtin(self) -> bool:
        """Whether the documents are made of Python's library: no row was written by the user."""
        return self.name.startswith("builtin:")

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes if isinstance(file, hub.Split) else _stat(file).st_size for file in self.files)

    @property
    def origin(self) -> str:
        """Split and commit of a hub data set; "" for local files."""
        return "; ".join(str(file) for file in self.files if isinstance(file, hub.Split))

    @property
    def identity(self) -> str:
        """Settings that, with the files' content, determine the documents."""
        return self.text_column

    def check(self) -> Columns:
        """Raise DataError for everything wrong in the rows of a first look, before minutes of tokenising.

        Returns what is read of the rows, nothing for text files.
        """
        if self.is_builtin:
            return Columns()
        columns = self._check_rows(self._first_look(), f"an object with its text under {self.text_column!r}")
        return columns if all(isinstance(file, hub.Split) or table_kind(file) for file in self.files) else Columns()

    def texts(self, document: str) -> list[str]:
        """Return the texts of a document that a tokenizer is trained on."""
        return [document]

    def documents(self) -> Iterator[Any]:
        """Yield the documents. Raises DataError for a bad row, unless bad rows are dropped."""
        for entry in self.entries():
            if not isinstance(entry, BadRow):
                yield entry
            elif not self.selection.drop_bad_rows:
                raise DataError(str(entry))

    def entries(self) -> Iterator[Any]:
        """Yield the documents, each text file and each row of a table, and a BadRow in the place of a bad one."""
        return (self.entry(place, row) for place, row in self._rows())

    def entry(self, place: str, row: dict | DataError) -> Any:
        """Return the document of a row or its BadRow."""
        if isinstance(row, DataError):
            return BadRow.of(place, row)
        try:
            return self.read(place, row)
        except DataError as error:
            return BadRow.of(place, error)

    def read(self, place: str, row: dict) -> Any:
        """Return the document of a row. Raises DataError."""
        return text_of(place, row, self.text_column)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        """Return the names of the columns that `read` reads."""
        return (self.text_column,)

    def format_name(self, row: dict) -> str:
        """Return the name of the row's format in specs/row_formats.py; "" if the recipe names the columns."""
        return ""

    def other_columns(self, row: dict) -> Iterator[dict[str, str]]:
        """Yield what the recipe could say, {key of `data`: column}, for rows like this one, which lacks columns."""
        yield nearest(row, {"text_column": self.text_column})

    def reading(self, keys: dict[str, str]) -> DataSource:
        """Return this source with other columns, as `other_columns` names them."""
        return replace(self, **keys)

    def refuse_lost_content(self, columns: Columns, reads: Callable[[str], bool] | None = None) -> None:
        """Do nothing: whoever trains on texts chooses one column. Tables of other documents raise DataError.

        Args:
            columns: what the rows have.
            reads: whether the chat template reads a key of a message, see `Columns.refuse_lost_content`.
        """

    def _check_rows(self, rows: Iterator[tuple[str, dict | DataError]], one_is: str) -> Columns:
        """Read all of these rows once, and return what they have in which column.

        Raises:
            DataError: with the first problems of all rows, and for content that would be lost.
        """
        columns, bad, num_rows = Columns(), BadRows(self.name, self.selection.drop_bad_rows), 0
        first: list[dict] = []
        try:
            for place, row in rows:
                num_rows += 1
                if isinstance(row, dict):
                    columns.add(row, self.columns_read(row), self.format_name(row))
                    first += [row] if len(first) < _TRIED_ROWS else []
                entry = self.entry(place, row)
                if isinstance(entry, BadRow):
                    bad.add(entry)
        except DataError as error:  # the file itself is broken here
            if not bad.count:
                raise
            raise DataError(f"{error}\nbefore that, {bad.count:,} rows cannot be used\n{bad}") from error
        if not num_rows:
            raise DataError(f"{self.name}: there are no rows; {what_rows_are(self.files, one_is)}")
        hint = ""
        if bad.count == num_rows and bad.lack_columns:
            hint = f"name the columns with {self.columns_are_named_by}"
            for keys in filter(None, self.other_columns(first[0])):
                # the first settings of `data` with which all of these rows can be read without a loss
                candidate, tried = self.reading(keys), Columns()
                with suppress(DataError):
                    for row in first:
                        candidate.read("", row)
                        tried.add(row, candidate.columns_read(row))
                    candidate.refuse_lost_content(tried)
                    given = (f"data.{key}={shlex.quote(column)}" for key, column in keys.items())
                    hint = f"did you mean {' '.join(given)}?"
                    break
        bad.check(num_rows, hint)
        self.refuse_lost_content(columns)
        return columns

    def _rows(self) -> Iterator[tuple[str, dict | DataError]]:
        rows = (row for file in self.files for row in self._rows_of(file))
        yield from islice(rows, self.selection.max_samples)

    def _rows_of(self, file: Path | hub.Split) -> Iterator[tuple[str, dict | DataError]]:
        if isinstance(file, hub.Split) or table_kind(file):
            return table_rows(file, "texts")
        return iter([(str(file), {self.text_column: read_text(file)})])

    def _first_look(self) -> Iterator[tuple[str, dict | DataError]]:
        """Yield all rows within _CHECK_SECONDS; then only the last row of each jsonl file that is left."""
        deadline, left = time.monotonic() + _CHECK_SECONDS, self.selection.max_samples
        for nth, file in enumerate(self.files):
            for row in self._rows_of(file):
                if left == 0:
                    return
                left = None if left is None else left - 1
                yield row
                if time.monotonic() > deadline and left is None:
                    rest = (later for later in self.files[nth:] if not isinstance(later, hub.Split))
                    yield from (last for later in rest for last in read_last_row(later))
                    return


@dataclass(frozen=True)
class TableSource(DataSource):
    """Tables with one document per row. `read` turns (place, row) into a document or raises DataError."""

    documents_are: ClassVar[str]  # name of the documents in messages
    a_line_is: ClassVar[str]  # description of one line in messages

    def read(self, place: str, row: dict) -> Any:
        raise NotImplementedError

    def columns_read(self, row: dict) -> tuple[str, ...]:
        raise NotImplementedError

    def check(self) -> Columns:
        """Read all rows once, so that a mistake in the last one is reported before minutes of tokenising."""
        return Columns() if self.is_builtin else self._check_rows(self._rows(), self.a_line_is)

    def refuse_lost_content(self, columns: Columns, reads: Callable[[str], bool] | None = None) -> None:
        columns.refuse_lost_content(self.name, self.selection.ignore_columns, self._advice(columns), reads)

    def _advice(self, columns: Columns) -> str:
        """Return a way to read the columns that are not read, for the message; "" if none is known."""
        return ""

    def _rows_of(self, file: Path | hub.Split) -> Iterator[tuple[str, dict | DataError]]:
        return table_rows(file, self.documents_are)


def table_rows(file: Path | hub.Split, documents_are: str) -> Iterator[tuple[str, dict | DataError]]:
    """Yield the rows of a table as `formats.rows_or_errors`. Raises DataError also for a file that is not a table."""
    if isinstance(file, hub.Split):
        yield from file.rows()
        return
    if table_kind(file) is None:
        raise DataError(
            f"{file}: not a table; {documents_are} must be the rows of a jsonl, json, parquet, csv, tsv or arrow file"
        )
    yield from rows_or_errors(file)


def find_source(
    name: str, pattern: str | None = None, text_column: str = "text", selection: Selection = WHOLE
) -> DataSource:
    """Find the data of `data.path`: a file, a folder's data files sorted by path, or OWNER/NAME on the hub.

    Raises DataError for a path that cannot be read, and as `selection.folder_files` and `hub.read_hub_split` do.

    Args:
        pattern: glob for the files of the folder or of the hub's repository, None for all data files or the split.
        text_column: column of a table that holds the text.
    """
    if name == BUILTIN:
        return DataSource(name, builtin_files())
    if is_hub_name(name):
        if not pattern:
            return DataSource(name, (hub.read_hub_split(name, selection),), text_column, selection=selection)
        root = hub.download_hub_folder(name, pattern, selection.revision)
        return DataSource(name, folder_files(root, name, pattern), text_column, selection=selection)
    root = Path(name).expanduser()
    problem = path_problem(root)
    if problem.startswith("no such"):
        raise DataError(f"{name}: data.path does not exist; give a file, a folder, or {BUILTIN}{pattern_hint(name)}")
    if problem:
        raise DataError(f"{name}: {problem}")
    if root.is_file():
        return DataSource(name, (root,), text_column, selection=selection)
    return DataSource(name, folder_files(root, name, pattern, selection.own), text_column, selection=selection)


def fingerprint(source: DataSource, cache: Path) -> str:
    """Return a digest of the files' content, or of the commit for a split of the hub.

    The digest is cached by the files' paths, sizes, times and inodes, so they are read once. These only say whether the
    files must be read again: the digest of a copy, or on another machine, is the same.
    """
    if (number := source.selection.max_samples) is not None:
        whole = replace(source, selection=replace(source.selection, max_samples=None))
        return digest("the first rows", number, fingerprint(whole, cache))
    splits = [file.identity for file in source.files if isinstance(file, hub.Split)]
    if not splits:
        return _fingerprint(source.local_files, cache)
    return digest("hub", splits, *([_fingerprint(source.local_files, cache)] if source.local_files else []))


def _fingerprint(files: tuple[Path, ...], cache: Path) -> str:
    stats = [(file, _stat(file)) for file in files]
    # inode and time of change, as git's index has: a tool may replace a file, and give the new one the old one's times
    key = digest([(str(file.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for file, s in stats])
    remembered = cache / "fingerprints" / key
    with suppress(OSError):
        known, _, check = remembered.read_text(encoding="utf-8", errors="replace").partition(" ")
        if check == digest(key, known):
            return known
    # with the kind, because the same bytes are other documents as a table than as a text
    hashes, problems = [], []
    for file in files:
        try:
            hashes.append((table_kind(file), file_sha256(file)))
        except OSError as error:
            problems.append(str(unreadable(file, error)))
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        raise DataError("\n".join(problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])))
    contents = digest(hashes)
    # Git's "racy" problem: a file modified just now may change again within one tick of the file system's clock.
    if max(max(s.st_mtime_ns, s.st_ctime_ns) for _, s in stats) < (time.time() - _RACY_SECONDS) * 1e9:
        # Only speed is lost; a cache that cannot be written is reported where the tokens are stored.
        with suppress(OSError, StorageError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_text(remembered, f"{contents} {digest(key, contents)}")
    return contents


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise unreadable(file, error) from error


def is_held_out(document: Any, fraction: float) -> bool:
    """Whether a document is held out, by a hash, so that its copies and rows of its prompt are on the same side."""
    return fraction > 0 and _hash(document) < fraction * 2**64


def fraction_of_one(source: DataSource, fraction: float) -> float:
    """Return the smallest fraction that holds out a document and is at least `fraction`; 0 for 0.

    It holds out the document with the lowest hash, its copies and the rows of its prompt. Copies of one document alone,
    or rows of one prompt, stay for training.
    """
    lowest, highest = 2**64, -1
    for document in source.documents() if fraction > 0 else ():
        if str(document):  # no encoder makes tokens of an empty one
            value = _hash(document)
            if value < fraction * 2**64:
                return fraction
            lowest, highest = min(lowest, value), max(highest, value)
    # the next float, because the hash has more digits than one
    return math.nextafter(lowest / 2**64, 1.0) if lowest < highest else fraction


def _hash(document: Any) -> int:
    text = getattr(document, "split_key", "") or str(document)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def text_of(place: str, row: dict, column: str, fix: str = "set data.text_column, or remove rows without text") -> str:
    """Return the text of a table's row. Raises DataError if the column is missing (with `fix`) or not text."""
    if column not in row:
        raise no_column(place, row, repr(column), fix)
    if not isinstance(row[column], str):
        raise DataError(f"{place}: {column!r} is {row[column]!r:.40}, not text; correct or remove the row")
    check_characters(place, column, row[column])
    return row[column]


def validation_fraction(recipe: Recipe) -> float:
    """Return the fraction of `data.path` that is held out: 0 if the evaluation has its own data."""
    return 0.0 if recipe.evaluation is not None else recipe.data.validation_fraction


def builtin_files() -> tuple[Path, ...]:
    """Return the .py files of the standard library on this machine, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        # Prune instead of filtering afterwards: site-packages can hold a hundred times the files of the library.
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            f"{BUILTIN}: this Python has no .py files of its library in {root}; set data.path to other data"
        )
    return tuple(sorted(files))
