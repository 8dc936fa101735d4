"""Output of the benchmarks: a table on a terminal, plain lines in a file, and the same numbers as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rich.table import Table

from samecurve.errors import ConfigurationError
from samecurve.storage.atomic import write_json
from samecurve.storage.terminal import TextConsole


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write numbers, hardware and versions to FILE")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table. The first column is text, the others are formatted numbers."""
    screen = TextConsole()
    if title:
        screen.print(f"\n{title}")
    if screen.is_terminal:
        table = Table(*columns)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        screen.print(table)
        return
    for line in plain_lines([columns, *rows]):
        screen.print(line)


def plain_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())
    return lines


def print_line(line: str) -> None:
    TextConsole().print(line)


def write_json_file(path: Path | None, name: str, facts: Mapping[str, object], **numbers: object) -> None:
    """Write the numbers as JSON, if there is a path. facts: from timing.environment. Raises StorageError."""
    if path is not None:
        write_json(path, {"benchmark": name, **facts, **numbers})
        print_line(f"{path}")


def parse_integers(option: str, given: str | None, least: int = 0) -> list[int]:
    """Parse an option such as `1,2,4`. Raises ConfigurationError, for a number below `least`, too."""
    try:
        numbers = [int(number) for number in (given or "").split(",") if number]
    except ValueError:
        numbers = [least - 1]
    if any(number < least for number in numbers):
        wanted = f"whole numbers of at least {least}, separated by commas"
        raise ConfigurationError(f"{option}: found {given}, but it must be {wanted}")
    return numbers


def parse_names(option: str, given: str | None, known: Collection[str], default: Iterable[str]) -> list[str]:
    """Parse an option such as `a,b` with known names.

    Args:
        option: name of the option in the message, with its dashes.
        given: names separated by commas; None or "" selects `default`.
        known: the legal names.
        default: the names of an option that was not given.

    Raises:
        ConfigurationError: for a name that is not known.
    """
    names = [name for name in (given or "").split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(f"{option}: found {unknown[0]}, but the names are {', '.join(known)}")
    return names or list(default)
