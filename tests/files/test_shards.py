"""scripts/test.sh --shard: the parts are all of the tests, and none twice."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = {f"test_{number}.py": number % 7 + 1 for number in range(50)}


@pytest.fixture(scope="module")
def shards():
    spec = importlib.util.spec_from_file_location("shards", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_the_parts_are_all_of_the_files_and_alike(shards, parts):
    found = [shards.files_of(part, parts, TESTS) for part in range(1, parts + 1)]
    assert sorted(name for files in found for name in files) == sorted(TESTS)
    loads = [sum(TESTS[name] for name in files) for files in found]
    assert max(loads) - min(loads) <= max(TESTS.values())


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "a/b", "1/0"])
def test_a_part_that_there_is_not(shards, text):
    with pytest.raises(pytest.UsageError, match=f"--shard: found {text}, K/N"):
        shards._shard(text)
