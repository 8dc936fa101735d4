"""scripts/test.sh --shard: a file belongs to one part, always the same."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "conftest.py"
FILES = [path.relative_to(PATH.parent).as_posix() for path in sorted(PATH.parent.glob("*/test_*.py"))]


@pytest.fixture(scope="module")
def shards():
    spec = importlib.util.spec_from_file_location("shards", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_every_part_has_its_share_of_the_files(shards, parts):
    sizes = Counter(shards.part_of(file, parts) for file in FILES)
    assert sorted(sizes) == list(range(1, parts + 1))
    assert parts > 4 or max(sizes.values()) < 1.5 * min(sizes.values())  # four are what is used


def test_a_file_stays_in_its_part(shards):
    """Written down once: a part that ran last week stands for the same files."""
    files = ("unit/test_config.py", "faults/test_corruption.py", "distributed/test_equal_curves.py")
    assert [shards.part_of(file, 4) for file in files] == [1, 2, 4]


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "1/0"])
def test_a_part_that_there_is_not(shards, text):
    with pytest.raises(pytest.UsageError, match=f"--shard: found {text}, K/N"):
        shards._shard(text)
