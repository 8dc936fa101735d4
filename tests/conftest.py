"""`pytest --shard K/N`: the K-th of N parts of the tests, whole files each, for runs that are too long in one piece."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

import pytest

from samecurve.engines import start

start.quote_path()  # tests compile without an engine, too

TESTS = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", type=_shard, help="run the K-th of N parts, counted from 1")


def _shard(text: str) -> tuple[int, int]:
    try:
        part, parts = (int(number) for number in text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--shard: found {text}, K/N with K from 1 to N is needed, for example 2/4")
    return part, parts


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--shard") is None:
        return
    part, parts = config.getoption("--shard")
    by_part = defaultdict(list)
    for item in items:
        by_part[part_of(item.path.relative_to(TESTS).as_posix(), parts)].append(item)
    items[:] = by_part.pop(part, [])
    config.hook.pytest_deselected(items=[item for others in by_part.values() for item in others])


def part_of(file: str, parts: int) -> int:
    """The part that a file belongs to, from its path in tests/ alone: parts that run on different days, with commits
    between them, are still all of the tests. A file's tests share fixtures, so they stay together."""
    return int(hashlib.md5(file.encode(), usedforsecurity=False).hexdigest(), 16) % parts + 1
