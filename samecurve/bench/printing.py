"""Output of the benchmarks: tables, and the same numbers as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.storage.atomic import write_json
from samecurve.storage.terminal import TextConsole, aligned


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write numbers, hardware and versions to FILE")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table. The first column is text, the others are formatted numbers."""
    print_line("\n".join([*([f"\n{title}"] if title else []), aligned([columns, *rows])]))


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
        given: names separated by commas; None or "" selects `default`.
        default: the names of an option that was not given.

    Raises:
        ConfigurationError: for a name that is not known.
    """
    names = [name for name in (given or "").split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(f"{option}: found {unknown[0]}, but the names are {', '.join(known)}")
    return names or list(default)
