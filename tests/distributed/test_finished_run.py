"""What a finished run says and does when something is started in its directory."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, launch_command

STEPS = 4


def start(workspace, directory: Path, strategy: str | None, world: int, *overrides: str):
    path = workspace.strategy(strategy) if strategy else None
    command = [*launch_command("fork", path, world, ROOT), str(workspace.recipe), f"output_dir={directory}"]
    command += [f"steps={STEPS}", f"checkpoint.every_steps={STEPS}"]
    command += ["schedule.warmup_steps=1", *overrides]
    return workspace.execute(command + (["--strategy", str(path)] if path else []), directory)


def everything(directory: Path) -> dict[str, bytes]:
    """All files but what tells processes that another one is alive."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.parent.name != "heartbeats"]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def check_refused(directory: Path, code: int, before: dict[str, bytes]) -> None:
    """Nothing changed but that status.json says, beside the state of the run, that a start was refused."""
    after = everything(directory)
    told = json.loads(after.pop("status.json"))
    assert told.pop("refused_start")["exit_code"] == code
    assert told == json.loads(before["status.json"])
    assert after == {name: content for name, content in before.items() if name != "status.json"}


def test_a_finished_run_is_done_and_a_refused_start_leaves_it_alone(workspace, tmp_path):
    directory = tmp_path / "run"
    done = start(workspace, directory, None, 1)
    assert done.returncode == 0, done.output
    before = everything(directory)
    again = start(workspace, directory, "ddp", 2)
    assert again.returncode == 0, again.output
    assert again.output.count(f"nothing to do: {directory} is at step {STEPS} of {STEPS}, and its model is in") == 1
    assert everything(directory) == before
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"tex')
    for code, override in (
        (3, f"data.path={broken}"),
        (4, "seed=9"),
        (2, f"tokenizer.path={directory / 'model'}"),
        (2, "optimizer.learning_rate=0.5"),
        (2, "steps=x"),
    ):
        refused = start(workspace, directory, None, 1, override)
        assert refused.returncode == code, refused.output
        check_refused(directory, code, before)
    launched = start(workspace, directory, "ddp", 2, "seed=9")
    assert launched.returncode == 1 and launched.output.count("CheckpointError (exit code 4)") == 1, launched.output
    check_refused(directory, 4, before)
    again = start(workspace, directory, None, 1)
    assert again.returncode == 0 and everything(directory) == before, again.output
    longer = start(workspace, directory, None, 1, f"steps={STEPS + 2}")
    assert longer.returncode == 0, longer.output
    assert longer.column("step") == list(range(1, STEPS + 3))
    (jump,) = re.findall(r"^learning rate: (\S+) at step 4, (\S+) at the next", longer.output, re.MULTILINE)
    assert [float(rate) for rate in jump] == pytest.approx(
        longer.column("learning_rate")[STEPS - 1 : STEPS + 1], rel=1e-5
    )
    old = directory / "previous" / "1"
    assert (old / "model" / "config.json").is_file() and (old / "status.json").read_bytes() == before["status.json"]
    assert "refused_start" not in longer.status


def test_a_session_without_a_step_changes_no_record(workspace, tmp_path):
    """A finished adapter run, then one whose export is missing: made with the facts of the session that trained."""
    directory = tmp_path / "run"
    overrides = ("export.verify=off", *workspace.lora)
    assert start(workspace, directory, None, 1, *overrides).returncode == 0
    before = everything(directory)
    again = start(workspace, directory, None, 1, *overrides)
    assert (again.returncode, everything(directory)) == (0, before), again.output
    changed = start(workspace, directory, None, 1, *overrides, "optimizer.learning_rate=0.5")
    text = f"nothing to do: {directory} is at step {STEPS} of {STEPS}; 1 changed key has no effect: "
    assert changed.returncode == 2 and f"{text}optimizer.learning_rate" in changed.output, changed.output
    assert f"-> 0.5; steps={2 * STEPS} goes on, output_dir={directory}-2 starts another run" in changed.output
    check_refused(directory, 2, before)
    card = (directory / "model" / "README.md").read_text()
    shutil.rmtree(directory / "model")
    missing = start(workspace, directory, None, 1, *overrides)
    assert missing.returncode == 0 and f"no step is left to train: {STEPS} of {STEPS}" in missing.output
    after = everything(directory)
    assert all(after[name] == before[name] for name in ("run.json", "metrics.jsonl"))
    lines = zip(card.splitlines(), (directory / "model" / "README.md").read_text().splitlines(), strict=True)
    assert [old for old, new in lines if old != new and "card written" not in old] == []


SESSIONS = """
import os, sys
import train
from samecurve.run import lifecycle
from samecurve.training import startup
from samecurve.training.evaluator import Evaluation

metrics, calls = Evaluation.metrics, []

def failing(*given):
    calls.append(1)
    if len(calls) == at:
        raise ValueError("of an evaluation")
    return metrics(*given)

for folder, at in (("whole", 0), ("run", 1), ("run", 1), ("run", 2), ("run", 0)):
    if not (pid := os.fork()):
        Evaluation.metrics = failing
        sys.argv[1:] += [f"output_dir={folder}"]
        lifecycle.end_with(train.main)
    print("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_an_evaluation_that_failed_is_made_at_the_next_start(workspace, tmp_path):
    """Of step 2 twice, of the last step once; the lines and the best checkpoint are those of an undisturbed run."""
    overrides = [f"steps={STEPS}", "checkpoint={every_steps: 2, best: eval_loss}", "evaluate.every_steps=2"]
    command = [sys.executable, "-c", SESSIONS, str(workspace.recipe), *overrides, "schedule.warmup_steps=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    codes = re.findall(r"^code (\d+)$", done.stdout, re.MULTILINE)
    assert codes == ["0", "1", "1", "1", "0"], done.stdout + done.stderr
    whole, run = ([json.loads(line) for line in open(tmp_path / name / "metrics.jsonl")] for name in ("whole", "run"))
    assert [line["step"] for line in run] == [1, 2, 3, 4]
    assert [line.get("eval_loss") for line in run] == [line.get("eval_loss") for line in whole]
    assert [line["loss"] for line in run] == [line["loss"] for line in whole]
    best = [(tmp_path / name / "checkpoints" / "best.json").read_text() for name in ("whole", "run")]
    assert best[0] == best[1]


def test_epochs_have_the_same_steps_on_any_number_of_processes(workspace):
    half = ("epochs=0.5", "evaluate.every_steps=0", "checkpoint.every_epochs=0.25", "schedule.warmup_steps=1")
    single = workspace.run(None, 1, *half, launcher="python")
    assert single.returncode == 0, single.output
    num_rows, size = single.facts["data"]["train"]["rows"], single.facts["recipe"]["batch"]["global_batch_size"]
    steps = math.ceil(num_rows / 2 / size)
    assert single.column("samples") == [size * step for step in range(1, steps + 1)]
    assert single.column("epoch")[-1] == pytest.approx(steps * size / num_rows)
    assert f"{steps * size / num_rows:.4g} passes over {num_rows} rows" in single.output
    assert single.facts["recipe"]["checkpoint"]["every_steps"] == round(num_rows / 4 / size)
    ddp = workspace.run("ddp", 2, *half)
    assert ddp.column("samples") == single.column("samples") and ddp.facts["engine"] == "DistributedDataParallel"
    assert ddp.column("loss") == pytest.approx(single.column("loss"), rel=1e-5)
