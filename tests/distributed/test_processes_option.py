"""`python train.py RECIPE --num_processes 2` is a run like under a launcher."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT


def test_the_ranks_train_as_a_launcher_s(workspace):
    expected = workspace.run("zero2", 2, "batch.micro_batch_size=2", "precision=fp32")
    directory = workspace.folder / "own_ranks"
    command = [sys.executable, "train.py", str(workspace.recipe), f"output_dir={directory}", "batch.micro_batch_size=2"]
    command += ["precision=fp32", "--strategy", "configs/zero2.yaml", "--num_processes", "2"]
    found = workspace.execute(command, directory)
    assert found.returncode == 0, found.output
    assert (found.facts["launcher"], found.facts["world_size"]) == ("train.py", 2)
    assert found.facts["engine"] == expected.facts["engine"]
    assert found.column("loss") == expected.column("loss")
    assert found.column("grad_norm") == expected.column("grad_norm")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_its_code_comes_back(number, workspace):
    directory = workspace.folder / f"own_ranks_{number.name}"
    command = [sys.executable, "train.py", str(workspace.recipe), f"output_dir={directory}", "steps=100000"]
    command += ["batch.micro_batch_size=2", "--strategy", "configs/ddp.yaml", "--num_processes", "2"]
    process = subprocess.Popen(command, cwd=ROOT, env=workspace.environment(), stderr=subprocess.PIPE, text=True)
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.terminate()  # or else a run that goes on would train beside the tests after this one
    status = json.loads((directory / "status.json").read_text())
    assert (process.returncode, status["state"], status["exit_code"]) == (75, "preempted", 75), errors
    assert errors.count("preempted (exit code 75)") == 1, errors
    assert (directory / "checkpoints" / f"step_{status['step']:08d}").is_dir()


@pytest.mark.full
def test_a_refused_rank_ends_all_with_its_code(workspace):
    directory = workspace.folder / "own_ranks_refused"
    command = [sys.executable, "train.py", str(workspace.recipe), f"output_dir={directory}", "data.path=README.md"]
    command += ["--strategy", "configs/ddp.yaml", "--num_processes", "2", "batch.micro_batch_size=2"]
    found = workspace.execute(command, directory)
    assert found.returncode == found.status["exit_code"] == 3, found.output  # one document cannot be divided
    assert found.output.count("DataError (exit code 3)") == 1
