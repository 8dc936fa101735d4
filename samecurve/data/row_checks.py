"""Rows that cannot be used: counts them, reports the first of each kind in one error, or drops them."""

from __future__ import annotations

import difflib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from samecurve.data import hub
from samecurve.errors import DataError
from samecurve.specs.data_names import table_kind
from samecurve.storage.atomic import storage_errors

SHOWN_PROBLEMS = 10
_PLACE = re.compile(r"(.*?):(?: row )?(\d+)")


class BadRow(NamedTuple):
    """A row that cannot be used, with the reason and the fix."""

    place: str
    reason: str

    @classmethod
    def of(cls, place: str, error: DataError) -> BadRow:
        return cls(place, str(error).removeprefix(f"{place}: "))

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class BadRows:
    """Counts bad rows and keeps the first of each kind.

    Args:
        drops: whether bad rows are left out; otherwise they are an error.
        file: where each bad row is written as a line of JSON; None: nowhere.
    """

    def __init__(self, name: str, drops: bool, file: IO[str] | None = None):
        self.count = 0
        self._name, self._drops, self._file = name, drops, file
        self._kinds: dict[str, tuple[BadRow, int]] = {}  # the first bad row and the number of rows by reason

    def add(self, row: BadRow) -> None:
        self.count += 1
        if row.reason in self._kinds or len(self._kinds) < SHOWN_PROBLEMS:
            first, count = self._kinds.get(row.reason, (row, 0))
            self._kinds[row.reason] = first, count + 1
        if self._file:
            match = _PLACE.fullmatch(row.place)
            place = {"file": match[1], "line": int(match[2])} if match else {"file": row.place, "line": None}
            self._file.write(json.dumps({**place, "reason": row.reason}) + "\n")

    @property
    def lack_columns(self) -> bool:
        return all(reason.startswith("no column") for reason in self._kinds)

    def check(self, num_rows: int, fix: str = "", complete: bool = True) -> None:
        """Raise one DataError for all bad rows, unless they are to be dropped and others are left.

        Args:
            fix: advice if all rows are bad.
            complete: whether all rows of the source were read.
        """
        if not self.count or (self._drops and self.count < num_rows):
            return
        one = self.count == 1
        fix = f"; {fix}" if fix else ""
        if self.count < num_rows:
            fix = f", or set data.bad_rows=drop to train without {'it' if one else 'them'}"
        if one:
            raise DataError(f"{next(iter(self._kinds.values()))[0]}{fix}")
        lines = [f"{row}{f' (and {n - 1:,} more rows like it)' if n > 1 else ''}" for row, n in self._kinds.values()]
        more = self.count - sum(count for _, count in self._kinds.values())
        lines += [f"and {more:,} more"] if more else []
        of = f"{self.count:,} of {'' if complete else 'the first '}{num_rows:,} rows cannot be used"
        correct = "; correct or remove them" if self.count < num_rows else ""
        raise DataError("\n".join([f"{self._name}: {of}{correct}{fix}", *(f"  {line}" for line in lines)]))

    def __str__(self) -> str:
        return "\n".join(f"  {row}" for row, _ in self._kinds.values())


def nearest(row: Iterable[str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the most similar name among a row's columns for each missing one; {} if one of them has none.

    Args:
        row: the names of the row's columns.
        wanted: columns by key of the recipe's `data` block.
    """
    names, keys = [str(name) for name in row], {}
    free = [name for name in names if name not in wanted.values()]
    for key, column in wanted.items():
        if column in names:
            continue
        near = difflib.get_close_matches(column, [name for name in free if name not in keys.values()], n=1, cutoff=0.6)
        if not near:
            return {}
        keys[key] = near[0]
    return keys


def first_bad_rows(files: Iterable[Path], number: int = 3) -> list[str]:
    """Return place and reason of the first bad rows in the caches' files, one of each reason."""
    first: dict[str, str] = {}
    for file in files:
        with open(file, encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                place = row["file"] if row["line"] is None else f"{row['file']}:{row['line']}"
                first.setdefault(row["reason"], f"{place}: {row['reason']}")
                if len(first) == number:
                    return list(first.values())
    return list(first.values())


def write_bad_rows(files: Iterable[Path], target: Path) -> None:
    """Write the bad rows of several caches into one file; no file for none."""
    with storage_errors(target):
        target.unlink(missing_ok=True)
        for file in files:
            if file.stat().st_size:
                with open(file, "rb") as lines, open(target, "ab") as written:
                    shutil.copyfileobj(lines, written)


def what_rows_are(files: Iterable[Path | hub.Split], one_is: str) -> str:
    """Describe the rows that each kind of file should have, for a message about a table without rows."""
    kinds = {"hub" if isinstance(file, hub.Split) else table_kind(file) for file in files}
    row = one_is.replace("an object", "a row")
    meanings = {
        "csv": f"each line of a csv file below its header must be {row}",
        "tsv": f"each line of a tsv file below its header must be {row}",
        "arrow": f"each row of an arrow file must be {row}",
        "jsonl": f"each line of a jsonl file must be {one_is}",
        "json": f"a json file must be a list, in which each entry is {one_is}",
        "parquet": f"each row of a parquet file must be {row}",
        "hub": f"each row must be {row}",
    }
    return "; ".join(text for kind, text in meanings.items() if kind in kinds) or f"each row must be {one_is}"
