"""A disk that is full from the n-th write of a command on: exit code 7 with the path and the room, nothing lost.

A library that is loaded before libc lets writes fail, so that those of Rust and C++ code fail too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

HERE = Path(__file__).parent
# cases of full_disk_probe.py: the number of writes at least, and which part of them fails every day
CASES = {
    "train": (300, 299),
    "export": (30, 29),
    "checkpoint": (30, 29),
    "merge": (40, 39),
    "report": (4, 2),
    "generate": (2, 1),
    "predict": (2, 1),
    "evaluate": (4, 3),
    "inspect": (4, 3),
    "plan": (10, 9),
}
OPTIONAL = {"generate": "what it generated is not kept for the report"}  # a write that may fail


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler for the library that lets writes fail: apt-get install gcc")
    target = tmp_path_factory.mktemp("library") / "full_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, HERE / "full_disk.c", "-ldl"], check=True)
    return target


@pytest.mark.parametrize("part", [pytest.param("every write", marks=pytest.mark.full), "some writes"])
def test_a_full_disk(part, library, tmp_path):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "distributed")))
    strides = [f"{name}={1 if part == 'every write' else stride}" for name, (_, stride) in CASES.items()]
    environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    probe = [sys.executable, HERE / "full_disk_probe.py", library, tmp_path, *strides]
    done = subprocess.run(probe, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for name, (least, _) in CASES.items():
        first, *others = [outcome for outcome in outcomes if outcome["case"] == name]
        assert first["code"] == 0 and first["left"] and first["writes"] >= least and others, first
        for outcome in others:
            check(name, outcome, first["writes"])


def check(name: str, outcome: dict, num_writes: int) -> None:
    output = outcome["output"]
    if outcome["code"] == 0:  # the last writes of a run that is done, such as its last heartbeat
        assert outcome["left"] and (name in OPTIONAL or outcome["at"] > num_writes - 6), outcome
        return
    assert outcome["code"] == 7 and "ENOSPC" in output and "MiB are free" in output, outcome
    assert outcome.get("again", 0) == 0 and outcome.get("result", True), outcome
