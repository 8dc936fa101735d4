"""Sweeps: which runs they have, what is run again after a stop, and which run is the best one."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from samecurve.bench import jobs
from samecurve.cli import commands, sweep
from samecurve.errors import ConfigurationError
from samecurve.reports.history import NUM_BUCKETS

RECIPE = "recipes/quickstart.yaml"
LOSSES = {("1e-3", "0"): 2.0, ("1e-3", "1"): 2.1, ("3e-3", "0"): 1.5, ("3e-3", "1"): 1.9}


@pytest.mark.parametrize(
    "given, names",
    [
        (["seed=0,1"], ["seed=0", "seed=1"]),
        (["a.x=1,2", "steps=5", "b.y=3,4"], ["x=1,y=3", "x=1,y=4", "x=2,y=3", "x=2,y=4"]),
        (["a.x=1,2", "b.x=3,4"], ["a.x=1,b.x=3", "a.x=1,b.x=4", "a.x=2,b.x=3", "a.x=2,b.x=4"]),
        (["b=[0.9, 0.95],[0.9, 0.99]", 's="p,q"'], ["b=[0.9, 0.95]", "b=[0.9, 0.99]"]),
    ],
)
def test_all_combinations(given, names):
    members = list(sweep.combinations(given, Path("o")))
    assert [member.name for member in members] == names
    assert len({member.directory for member in members}) == len(names)
    assert all(re.fullmatch(r"o/[\w.,=+-]+", str(member.directory)) for member in members)
    assert 's="p,q"' in members[0].overrides or 's="p,q"' not in given


@pytest.mark.parametrize(
    "given, message",
    [
        (["seed=1"], "no key has several values"),
        (["seed=1,1"], "seed=1,1: a value is given twice"),
        (["seed=1,2", "output_dir=x"], "output_dir: each run of a sweep has its own"),
    ],
)
def test_what_is_no_sweep(given, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        list(sweep.combinations(given, Path("o")))


@pytest.fixture
def trainings(monkeypatch):
    """The trainings that a sweep starts: each writes what a finished run has, those in `failing` nothing."""
    started, failing = [], set()

    @contextmanager
    def processes(command, stream, world_size):
        overrides = command[command.index(RECIPE) + 1 :]
        values = dict(text.split("=", 1) for text in overrides)
        key = values["optimizer.learning_rate"], values["seed"]
        started.append(key)
        folder = Path(values["output_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        if key not in failing:
            (folder / "run.json").write_text(json.dumps({"overrides": overrides, "start_step": 0}))
            lines = [{"step": step, "loss": 3.0, "eval_loss": LOSSES[key] + 2 - step} for step in (1, 2)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        state = {"state": "failed", "reason": "no memory", "exit_code": 5} if key in failing else {"state": "done"}
        (folder / "status.json").write_text(json.dumps(state))
        yield subprocess.Popen(["false" if key in failing else "true"])

    monkeypatch.setattr(jobs, "processes", processes)
    return started, failing


def run_sweep(tmp_path, *more) -> int:
    swept = ["optimizer.learning_rate=1e-3,3e-3", "seed=0,1"]
    return commands.main(["sweep", RECIPE, *swept, *more, "--output", str(tmp_path / "s")])


def test_a_stopped_sweep_goes_on(trainings, tmp_path, capsys):
    started, failing = trainings
    failing.add(("3e-3", "0"))
    assert run_sweep(tmp_path) == 1
    printed = capsys.readouterr().out
    assert started == list(LOSSES) and "ended with exit code 5: no memory" in printed
    assert "best: learning_rate=3e-3,seed=1, held-out loss 1.9" in printed
    failing.clear()
    assert run_sweep(tmp_path) == 0
    printed = capsys.readouterr().out
    assert started[4:] == [("3e-3", "0")] and printed.count("done already") == 3
    best = tmp_path / "s" / "learning_rate=3e-3,seed=0"
    assert f"best: {best.name}, held-out loss 1.5" in printed
    assert f"python -m samecurve export {best} --dtype bf16" in printed
    table = (tmp_path / "s" / "table.md").read_text().splitlines()
    assert len(table) == 6 and table[4].startswith(f"| {best.name} | done | 2 | 3")
    drawn = (tmp_path / "s" / "losses.svg").read_text()
    assert all(f"learning_rate={rate},seed={seed}" in drawn for rate, seed in LOSSES)
    assert "held-out loss" in drawn and len(set(re.findall(r'stroke="(#\w+)" fill', drawn))) >= 4
    assert "A</b>" in (page := (tmp_path / "s" / "report.html").read_text()) and "D</b>" in page


def test_a_long_run_is_ranked_by_its_last_evaluation(tmp_path):
    """Its curve ends with the highest of three values, 9."""
    ends = {"a": [1.0, 9.0, 2.0], "b": [3.0, 3.0, 3.0]}
    members = [sweep.Member(name, tmp_path / name, []) for name in ends]
    for member in members:
        member.directory.mkdir()
        losses = [4.0] * (3 * NUM_BUCKETS - 3) + ends[member.name]
        lines = [{"step": step, "loss": 3.0, "eval_loss": loss} for step, loss in enumerate(losses, 1)]
        (member.directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (member.directory / "run.json").write_text(json.dumps({"overrides": [], "start_step": 0}))
        (member.directory / "status.json").write_text(json.dumps({"state": "done"}))
    assert "best: a, held-out loss 2" in sweep.compare(members, tmp_path)


def test_other_values_run_again(trainings, tmp_path):
    started, _ = trainings
    run_sweep(tmp_path)
    assert run_sweep(tmp_path, "steps=7") == 0
    assert len(started) == 8


@pytest.mark.parametrize("option", [["--num_processes", "2"], ["--slurm", "x.sh"]])
def test_several_processes_need_a_strategy(option, tmp_path, capsys):
    assert run_sweep(tmp_path, *option) == 2
    assert "needs --strategy, for example ddp" in capsys.readouterr().err


def test_mistakes_of_all_runs_are_told_first(trainings, tmp_path, capsys):
    assert run_sweep(tmp_path, "batch.global_batch_size=0", "optimizer.lr=2") == 2
    error = capsys.readouterr().err
    assert "use optimizer.learning_rate" in error and "global_batch_size" in error and not trainings[0]


def test_the_job_array_has_each_run_once(tmp_path):
    """bash, with stand-ins for SLURM's commands, tells which command each task would start."""
    script = tmp_path / "array.sh"
    assert run_sweep(tmp_path, "--strategy", "ddp", "--slurm", str(script)) == 0
    assert "#SBATCH --array=0-3\n" in script.read_text()
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\nexit 75\n')
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    for task, (rate, seed) in enumerate(LOSSES):
        text = script.read_text().replace("$PWD/.venv/bin", str(tmp_path))
        variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": str(task), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            ["bash", "-c", text], env={**variables, "SLURM_ARRAY_JOB_ID": "9"}, capture_output=True, text=True
        )
        folder = tmp_path / "s" / f"learning_rate={rate},seed={seed}"
        assert (
            f"train.py {RECIPE} --strategy configs/ddp.yaml optimizer.learning_rate={rate} seed={seed}" in done.stdout
        )
        assert f"output_dir={folder}" in done.stdout and f"requeue 9_{task}" in done.stdout
