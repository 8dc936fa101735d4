"""DeepSpeed at fp16's smallest loss scale: an overflow is skipped, every other error stays what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [
        (2, "DeepSpeedZeroOptimizer"),
        pytest.param(3, "DeepSpeedZeroOptimizer_Stage3", marks=pytest.mark.full),
    ],
)
def test_only_an_overflow_counts_as_one(stage, optimizer):
    command = [sys.executable, str(Path(__file__).with_name("fp16_zero_probe.py")), str(stage)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "FOUND " in done.stdout, done.stdout + done.stderr
    found = json.loads(done.stdout.split("FOUND ", 1)[1].splitlines()[0])
    assert found["optimizer"] == optimizer
    # nothing of a skipped gradient is left in the last one
    assert [step[:2] for step in found["steps"]] == [["2.0", True], ["inf", False], ["inf", False], ["2.0", True]]
    # and it is refused: no smaller scale would cure it
    assert [step[2].split(" at ")[0] for step in found["steps"]] == ["", *["the gradient norm is inf"] * 2, ""]
    assert found["without memory"] == "OutOfMemoryError: CUDA out of memory"
