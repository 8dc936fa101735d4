"""`pytest --shard K/N`: the K-th of N parts of the tests, whole files each, for runs that are too long in one piece."""

from __future__ import annotations

from collections import Counter

import pytest


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
    chosen = files_of(part, parts, Counter(str(item.path) for item in items))
    config.hook.pytest_deselected(items=[item for item in items if str(item.path) not in chosen])
    items[:] = [item for item in items if str(item.path) in chosen]


def files_of(part: int, parts: int, num_tests: dict[str, int]) -> set[str]:
    """The part's files, with about as many tests as the other parts have. A file's tests share fixtures, so they stay
    together."""
    loads = [0] * parts
    chosen = set()
    for file in sorted(num_tests, key=lambda name: (-num_tests[name], name)):
        lightest = loads.index(min(loads))
        loads[lightest] += num_tests[file]
        if lightest == part - 1:
            chosen.add(file)
    return chosen
