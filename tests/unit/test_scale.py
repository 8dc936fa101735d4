"""What runs beside the engine does not grow with the number of ranks: bytes and calls that Linux counts, by process.

The counters of all_gather_object and of a group that connects all ranks are beside them: what would grow, does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts the bytes of a process"),
]


@pytest.fixture(scope="module")
def counted() -> dict[int, dict]:
    """Of 2 and 4 ranks: per operation the bytes sent and read, and the calls; see scripts/bench_scale.py."""
    command = [sys.executable, str(ROOT / "scripts" / "bench_scale.py"), "--ranks", "2", "4", "--no_page"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {int(size): found for size, found in json.loads(done.stdout).items()}


def each(counted: dict, size: int, operation: str, key: str = "sent") -> float:
    """The mean of all ranks but rank 0."""
    found = counted[size][operation][key]
    return (found["all"] - found["rank 0"]) / (size - 1)


def test_a_step_is_the_same_few_bytes_for_each_rank(counted):
    for size in (2, 4):  # a message is 48 bytes and its content, and at most three go each way
        step = counted[size]["step"]
        assert step["sent"]["rank 0"] < 150 and step["sent"]["each"] < 300 and step["writes"]["each"] <= 6, step
        counts = counted[size]["tokens, ahead"]  # three numbers, at most three times as many messages
        assert counts["sent"]["rank 0"] < 600 and counts["sent"]["each"] < 1000, counts


def test_a_save_sends_each_index_to_one_rank(counted):
    index = each(counted, 2, "save")
    assert 9_000 < index < 14_000, index
    assert each(counted, 4, "save") == pytest.approx(index, rel=0.05)
    assert counted[4]["save"]["sent"]["rank 0"] < index / 4, "rank 0 sends what it concludes, and no index"
    # all_gather_object sends every index to every rank
    before = "save, by all_gather_object"
    assert each(counted, 4, before) == pytest.approx(3 * each(counted, 2, before), rel=0.05)


def test_a_checkpoint_is_found_by_reading_each_file_once(counted):
    for size in (2, 4):
        files, read = counted[size]["files"]["read"]["all"], counted[size]["find"]["read"]["all"]
        assert files <= read < 1.1 * files, (size, files, read)
    assert each(counted, 4, "find") < 2_000, "its share of the manifest and the state, and what it passes on"


def test_a_load_gives_each_rank_its_part_of_the_index(counted):
    sent = [each(counted, size, "load") for size in (2, 4)]
    assert sent[1] == pytest.approx(sent[0], rel=0.05), sent
    index = counted[4]["load"]["read"]
    assert index["rank 0"] > 50 * (index["all"] - index["rank 0"]) / 3, "rank 0 alone reads it"


def test_a_group_connects_only_ranks_that_have_something_to_say(counted):
    # at most the store's answers to one question of each rank
    assert counted[4]["group"]["sent"]["all"] < counted[4]["group, all connected"]["sent"]["all"] / 3
    connected = [counted[size]["group, all connected"]["sent"]["all"] for size in (2, 4)]
    assert connected[1] > 4 * connected[0], "rank 0's store answers each rank about every other one"
