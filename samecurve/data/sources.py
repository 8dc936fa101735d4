"""From `data.path` to documents: a file or folder of text or tables, a data set of the hub, or Python's own sources."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from samecurve.config.paths import path_problem, pattern_hint
from samecurve.data import hub
from samecurve.data.formats import check_characters, no_column, read_last_row, read_rows, read_text, unreadable
from samecurve.data.selection import WHOLE, Selection, folder_files
from samecurve.errors import DataError
from samecurve.specs.data_names import BUILTIN, is_hub_name
from samecurve.specs.file_kinds import table_kind
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

# The last two are the library's own, but tables of characters and pages of help instead of code.
_NOT_STDLIB = frozenset("test tests idlelib site-packages dist-packages __pycache__ encodings pydoc_data".split())
_RACY_SECONDS = 2.0
_SHOWN_PROBLEMS = 10
_CHECK_SECONDS = 10.0


@dataclass(frozen=True)
class DataSource:
    """Files in a fixed order, or a split of the hub. `name`: the path as the user wrote it. `text_column`: of tables.

    A document is anything whose str() is its content: that decides whether it is held out, and how far a bar is.
    """

    name: str
    files: tuple[Path | hub.Split, ...]
    text_column: str = "text"
    quiet: ClassVar[bool] = False  # whether reading it shows nothing

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes if isinstance(file, hub.Split) else _stat(file).st_size for file in self.files)

    @property
    def origin(self) -> str:
        """Of the hub's data sets, which rows of which commit they are; "" for what lies here."""
        return "; ".join(str(file) for file in self.files if isinstance(file, hub.Split))

    @property
    def identity(self) -> str:
        """Beside the files' content: what decides which documents they hold."""
        return self.text_column

    def check(self) -> None:
        """Raise DataError for everything that a first look finds wrong, before minutes of tokenising."""
        if self.name != BUILTIN:
            expected = f"an object with its text under {self.text_column!r}"
            check_rows(self.name, self._first_look(), self._text, what_rows_are(self.files, expected))

    def texts(self, document: str) -> list[str]:
        """What of a document a tokenizer learns from."""
        return [document]

    def documents(self) -> Iterator[str]:
        """The text of every document: a text file is one, a row of a table is one. DataError where one is broken."""
        for file in self.files:
            for place, row in self._rows_of(file):
                yield self._text(place, row)

    def _text(self, place: str, row: dict) -> str:
        return text_of(place, row, self.text_column)

    def _rows_of(self, file: Path | hub.Split) -> Iterator[tuple[str, dict]]:
        if isinstance(file, hub.Split):
            yield from file.rows()
        else:
            yield from read_rows(file) if table_kind(file) else [(str(file), {self.text_column: read_text(file)})]

    def _first_look(self) -> Iterator[tuple[str, dict]]:
        """All rows; of files that take too long, the first ones, and the last one where it is found without them."""
        deadline = time.monotonic() + _CHECK_SECONDS
        for nth, file in enumerate(self.files):
            for row in self._rows_of(file):
                yield row
                if time.monotonic() > deadline:
                    rest = (later for later in self.files[nth:] if not isinstance(later, hub.Split))
                    yield from (last for later in rest for last in read_last_row(later))
                    return


@dataclass(frozen=True)
class TableSource(DataSource):
    """Tables each of whose rows is a document, which `read` makes of (place, row) or refuses with a DataError.

    documents_are, a_line_is: what messages call them.
    """

    documents_are: ClassVar[str]
    a_line_is: ClassVar[str]

    def read(self, place: str, row: dict) -> Any:
        raise NotImplementedError

    def check(self) -> None:
        """All rows once, so that a mistake in the last one is told before minutes of tokenising."""
        check_rows(self.name, self._rows(), self.read, what_rows_are(self.files, self.a_line_is))

    def documents(self) -> Iterator[Any]:
        return (self.read(place, row) for place, row in self._rows())

    def _rows(self) -> Iterator[tuple[str, dict]]:
        for file in self.files:
            yield from table_rows(file, self.documents_are)


def table_rows(file: Path | hub.Split, documents_are: str) -> Iterator[tuple[str, dict]]:
    """As tables.rows. DataError for a file that is no table."""
    if isinstance(file, hub.Split):
        yield from file.rows()
        return
    if table_kind(file) is None:
        raise DataError(f"{file}: {documents_are} are the rows of a jsonl, json, parquet or csv file")
    yield from read_rows(file)


def find_source(
    name: str, pattern: str | None = None, text_column: str = "text", selection: Selection = WHOLE
) -> DataSource:
    """The files behind `data.path`, sorted by path: a file, or the data of a folder. `pattern`: a glob in it.

    Of OWNER/NAME on the hub it is the split that is selected, or the files that the pattern matches.
    Errors: DataError for a path that cannot be read, as selection.folder_files and as hub.read_hub_split.
    """
    if name == BUILTIN:
        return DataSource(name, builtin_files())
    if is_hub_name(name):
        if not pattern:
            return DataSource(name, (hub.read_hub_split(name, selection),), text_column)
        root = hub.download_hub_folder(name, pattern, selection.revision)
        return DataSource(name, folder_files(root, name, pattern), text_column)
    root = Path(name).expanduser()
    problem = path_problem(root)
    if problem.startswith("no such"):
        raise DataError(f"{name}: data.path does not exist; give a file, a folder, or {BUILTIN}{pattern_hint(name)}")
    if problem:
        raise DataError(f"{name}: {problem}")
    if root.is_file():
        return DataSource(name, (root,), text_column)
    return DataSource(name, folder_files(root, name, pattern, selection.own), text_column)


def what_rows_are(files: Iterable[Path | hub.Split], one_is: str) -> str:
    """For a message about tables without a row: what each kind of them should hold."""
    kinds = {"hub" if isinstance(file, hub.Split) else table_kind(file) for file in files}
    meanings = {
        "csv": f"each line of a csv file below its header is {one_is.replace('an object', 'a row')}",
        "jsonl": f"each line of a jsonl file is {one_is}",
        "json": f"a json file is a list, in which each entry is {one_is}",
        "parquet": f"each row of a parquet file is {one_is.replace('an object', 'a row')}",
        "hub": f"each row is {one_is.replace('an object', 'a row')}",
    }
    return "; ".join(text for kind, text in meanings.items() if kind in kinds) or f"each row is {one_is}"


def check_rows(
    name: str, rows: Iterator[tuple[str, dict]], read: Callable[[str, dict], object], what_a_row_is: str
) -> None:
    """Read every (place, row) of a table. Raises DataError that tells the first problems of all rows together."""
    found: dict[str, list[str]] = {}  # what is wrong, and where
    num_rows = 0
    try:
        for place, row in rows:
            num_rows += 1
            try:
                read(place, row)
            except DataError as error:
                found.setdefault(str(error).removeprefix(f"{place}: "), []).append(str(error))
    except DataError as error:  # the rows end here: the file itself is broken
        found[str(error)] = [str(error)]
    if not found and not num_rows:
        raise DataError(f"{name}: holds no row; {what_a_row_is}")
    if found:
        raise DataError(_listed(name, list(found.values())))


def _listed(name: str, problems: list[list[str]]) -> str:
    """What is wrong with rows of one table: for each kind of mistake the first row that has it, and how many do."""
    num_rows = sum(map(len, problems))
    if num_rows == 1:
        return problems[0][0]
    shown = problems[:_SHOWN_PROBLEMS]
    lines = [rows[0] + (f" (and {len(rows) - 1} more rows like it)" if len(rows) > 1 else "") for rows in shown]
    more = num_rows - sum(map(len, shown))
    lines += [f"and {more} more"] if more else []
    return "\n".join([f"{name}: {num_rows} rows cannot be used", *(f"  {line}" for line in lines)])


def fingerprint(source: DataSource, cache: Path) -> str:
    """A digest of what the files hold; it is remembered by size and time of change, so they are read once.

    Of a split of the hub the commit says what it holds.
    """
    splits = [file.identity for file in source.files if isinstance(file, hub.Split)]
    files = [file for file in source.files if not isinstance(file, hub.Split)]
    if splits:
        return digest("hub", splits, *([_fingerprint(files, cache)] if files else []))
    return _fingerprint(files, cache)


def _fingerprint(files: list[Path], cache: Path) -> str:
    stats = [(str(file.resolve()), (stat := _stat(file)).st_size, stat.st_mtime_ns) for file in files]
    remembered = cache / "fingerprints" / digest(stats)
    if remembered.is_file() and (known := remembered.read_text()):
        return known
    contents = digest([(table_kind(file), hashed) for file, hashed in zip(files, _hashes(files), strict=True)])
    # Git's "racy" problem: a file changed just now may change again within one tick of the file system's clock.
    if max(mtime for _, _, mtime in stats) < (time.time() - _RACY_SECONDS) * 1e9:
        _remember(remembered, contents)
    return contents


def _hashes(files: list[Path]) -> list[str]:
    """Of each file. Raises DataError that names the first ones that cannot be read."""
    hashes, problems = [], []
    for file in files:
        try:
            hashes.append(_file_hash(file))
        except OSError as error:
            problems.append(str(unreadable(file, error)))
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        raise DataError("\n".join(problems[:_SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])))
    return hashes


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise unreadable(file, error) from error


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is held out: decided by its content, so copies of it never land on both sides."""
    if fraction == 0:
        return False
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return value < fraction * 2**64


def text_of(place: str, row: dict, column: str) -> str:
    """The text of a table's row. Raises DataError that names the place where there is none."""
    if column not in row:
        raise no_column(place, row, {"text_column": column}, fix="set data.text_column, or remove what has no text")
    if not isinstance(row[column], str):
        raise DataError(f"{place}: {column!r} is {row[column]!r:.40}, not text; remove or fill the row")
    check_characters(place, column, row[column])
    return row[column]


def validation_fraction(recipe: Recipe) -> float:
    """The part of `data.path` that is not trained on: none where the evaluation has data of its own."""
    return 0.0 if recipe.evaluation is not None else recipe.data.validation_fraction


def builtin_files() -> tuple[Path, ...]:
    """The modules of the standard library on this machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        # Pruned, not filtered afterwards: site-packages can hold a hundred times the files of the library.
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"{BUILTIN}: {root} holds no .py file; this Python keeps its library elsewhere: set data.path")
    return tuple(sorted(files))


def _file_hash(file: Path) -> str:
    hashed = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()


def _remember(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError:
        pass  # Only speed is lost; a cache that cannot be written is reported where the tokens are stored.
