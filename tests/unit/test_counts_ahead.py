"""A step's tokens are counted over all ranks while earlier steps are trained, in the same order on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from counts_probe import BROKEN_STEP, STEPS

PROBE = Path(__file__).with_name("counts_probe.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    command = [sys.executable, str(PROBE), str(tmp_path_factory.mktemp("counts"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["by thread", "by workers", "same rows"])
def test_every_rank_has_the_counts_of_each_step(ranks, case):
    """Also where a rank has fewer rows, a loader is late, and an evaluation counts in between."""
    expected = ranks[0]["expected"]
    assert len(expected) == STEPS and len({tuple(step) for step in expected}) > 2
    for found in ranks:
        assert found[case]["steps"] == expected and not found[case]["asked"]
        assert found[case]["evaluated"] == ranks[0]["by thread"]["evaluated"]


def test_a_loader_that_fails_ends_all_ranks_at_its_step(ranks):
    assert [found["broken"]["error"] for found in ranks] == ["RuntimeError", "OSError", "RuntimeError"]
    assert [len(found["broken"]["steps"]) for found in ranks] == [BROKEN_STEP] * 3
