"""DeepSpeed's loss scale in fp16: at its minimum an overflow is skipped, and to double it changes no update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = pytest.mark.parametrize(
    ("stage", "optimizer"),
    [
        (2, "DeepSpeedZeroOptimizer"),
        pytest.param(3, "DeepSpeedZeroOptimizer_Stage3", marks=pytest.mark.full),
    ],
)


def probe(stage: int, scale: str) -> dict:
    command = [sys.executable, str(Path(__file__).with_name("fp16_zero_probe.py")), str(stage), scale]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "FOUND " in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.split("FOUND ", 1)[1].splitlines()[0])


@STAGES
def test_only_an_overflow_counts_as_one(stage, optimizer):
    found = probe(stage, "smallest")
    assert found["optimizer"] == optimizer
    # nothing of a skipped gradient is left in the last one
    assert [step[:2] for step in found["steps"]] == [["2.0", True], ["inf", False], ["inf", False], ["2.0", True]]
    # and it is refused: no smaller scale would cure it
    assert [step[2].split(" at ")[0] for step in found["steps"]] == ["", *["the gradient norm is inf"] * 2, ""]
    assert found["without memory"] == "OutOfMemoryError: CUDA out of memory"


@pytest.mark.full
@STAGES
def test_a_scale_that_doubles_changes_no_update(stage, optimizer):
    found = probe(stage, "growing")
    assert found["optimizer"] == optimizer
    scales, norms, moved, good_steps = zip(*found["steps"], strict=True)
    assert scales == (16, 16, 16, 32, 32, 64, 64) and good_steps == (1, 2, 1, 2, 1, 2, 1)
    assert norms == pytest.approx([2] * 7) and moved == pytest.approx([1] * 7, rel=1e-3)
