"""Reads all rows of a table once and reports the first problems of all of them in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from samecurve.data import hub
from samecurve.errors import DataError
from samecurve.specs.file_kinds import table_kind

SHOWN_PROBLEMS = 10


def what_rows_are(files: Iterable[Path | hub.Split], one_is: str) -> str:
    """Describe the rows that each kind of file should have, for a message about a table without rows."""
    kinds = {"hub" if isinstance(file, hub.Split) else table_kind(file) for file in files}
    meanings = {
        "csv": f"each line of a csv file below its header must be {one_is.replace('an object', 'a row')}",
        "jsonl": f"each line of a jsonl file must be {one_is}",
        "json": f"a json file must be a list, in which each entry is {one_is}",
        "parquet": f"each row of a parquet file must be {one_is.replace('an object', 'a row')}",
        "hub": f"each row must be {one_is.replace('an object', 'a row')}",
    }
    return "; ".join(text for kind, text in meanings.items() if kind in kinds) or f"each row must be {one_is}"


def check_rows(
    name: str, rows: Iterator[tuple[str, dict]], read: Callable[[str, dict], object], what_a_row_is: str
) -> None:
    """Read every (place, row) of a table. Raises one DataError with the first problems of all rows."""
    found: dict[str, list[str]] = {}  # messages by the kind of mistake
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
        raise DataError(f"{name}: there are no rows; {what_a_row_is}")
    if found:
        raise DataError(_listed(name, list(found.values())))


def _listed(name: str, problems: list[list[str]]) -> str:
    """List the problems of a table's rows: for each kind of mistake its first row, and the number of rows."""
    num_rows = sum(map(len, problems))
    if num_rows == 1:
        return problems[0][0]
    shown = problems[:SHOWN_PROBLEMS]
    lines = [rows[0] + (f" (and {len(rows) - 1} more rows like it)" if len(rows) > 1 else "") for rows in shown]
    more = num_rows - sum(map(len, shown))
    lines += [f"and {more} more"] if more else []
    return "\n".join([f"{name}: {num_rows} rows cannot be used", *(f"  {line}" for line in lines)])
