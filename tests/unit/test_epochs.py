"""Epochs of every task against a loop of transformers and torch on the same set of rows, which it reads by itself.

Where a step takes the whole data set, nothing about the order of rows is asked of samecurve: the first gradient is that
of all rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("pretrain", "continue_pretrain", "sft", "distill", "dpo", "reward", "classify", "embed", "mlm")
EVERY_DAY = ("pretrain", "sft", "reward", "embed")  # packed, chats, pairs, and a loss across the batch
SELDOM = tuple(task for task in TASKS if task not in EVERY_DAY)
# (rows, rows per step, steps): all rows at once; two epochs, the end of the first one inside of a step
SHORT, LONG = ([12, 12, 2], [14, 4, 7]), ([60, 60, 3], [60, 8, 15], [100, 64, 25])
# Of texts that are cut into rows there are more, and so are the steps of an epoch.
PACKED_STEPS, ROWS_PER_TEXT = 12, 3
# each a process of its own; all but the first for `scripts/test.sh --full` only
PROCESSES = {"short": (SHORT, EVERY_DAY), "short and seldom": (SHORT, SELDOM), "long": (LONG, TASKS)}


def run(folder: Path, shapes, tasks) -> dict[str, list[dict]]:
    probe = Path(__file__).with_name("epoch_probe.py")
    wanted = dict.fromkeys(tasks, shapes)
    wanted["pretrain"] = [
        [rows, batch, max(steps, PACKED_STEPS, -(-ROWS_PER_TEXT * rows // batch))] for rows, batch, steps in shapes
    ]
    command = [sys.executable, str(probe), str(folder), json.dumps(wanted)]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=around, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {task: [line for line in lines if line["task"] == task] for task in tasks}


@pytest.fixture(scope="module")
def epochs(request, tmp_path_factory) -> tuple[dict[str, list[dict]], int]:
    """What the tasks of a process print, and how many of its lines are about each task."""
    shapes, tasks = PROCESSES[request.param]
    return run(tmp_path_factory.mktemp("epochs"), shapes, tasks), len(shapes)


@pytest.mark.parametrize(
    ("epochs", "task"),
    [
        pytest.param(name, task, marks=[] if name == "short" else pytest.mark.full)
        for name, (_, tasks) in PROCESSES.items()
        for task in tasks
    ],
    indirect=["epochs"],
)
def test_epochs_are_those_of_a_plain_loop(epochs, task):
    found, num_shapes = epochs
    assert len(found[task]) == num_shapes
    for line in found[task]:
        read = [row for step in line["steps"] for row in step]
        assert len(read) >= line["rows"] and all(len(set(step)) == len(step) for step in line["steps"])
        for start in range(0, len(read) - line["rows"] + 1, line["rows"]):
            assert sorted(read[start : start + line["rows"]]) == list(range(line["rows"]))
        for (loss, norm), (expected_loss, expected_norm) in zip(line["ours"], line["plain"], strict=True):
            assert loss == pytest.approx(expected_loss, rel=2e-5)
            assert norm == pytest.approx(expected_norm, rel=2e-4)
