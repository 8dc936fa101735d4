"""`evaluate --watch`: which checkpoints are evaluated, when it ends, and who reads the numbers."""

from __future__ import annotations

import json

import pytest

from samecurve.bench import watch
from samecurve.cli import commands
from samecurve.errors import CheckpointError
from samecurve.reports.history import History
from samecurve.run.run_directory import WATCHED, read_metrics


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that saves a checkpoint between any two looks at it, and is done after the third."""
    saved = []

    def save(seconds: float = 0) -> None:
        saved.append(2 * len(saved) + 2)
        (tmp_path / "checkpoints" / f"step_{saved[-1]:08d}").mkdir(parents=True)
        state = "done" if len(saved) == 3 else "running"
        (tmp_path / "status.json").write_text(json.dumps({"state": state}))

    save()
    lines = [{"step": step, "loss": 5.0 - step / 10} for step in range(1, 7)]
    lines[1] |= {"eval_loss": 1.25}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(watch.time, "sleep", save)
    monkeypatch.setattr(watch, "check_files", lambda *_: [])
    monkeypatch.setattr(watch, "_evaluate", lambda run, folder, *_: {"eval_loss": float(folder.name[-1])})
    return tmp_path


def steps_watched(run) -> list[int]:
    return [json.loads(line)["step"] for line in (run / WATCHED).read_text().splitlines()]


def test_each_checkpoint_once_until_the_run_is_done(run):
    before = (run / "metrics.jsonl").read_bytes()
    assert watch.run(run, None, False) == 0
    assert steps_watched(run) == [2, 4, 6] and (run / "metrics.jsonl").read_bytes() == before
    assert watch.run(run, None, False) == 0
    assert steps_watched(run) == [2, 4, 6]


def test_history_has_the_numbers_but_the_runs_own_first(run):
    watch.run(run, None, False)
    evaluated = {record["step"]: record["eval_loss"] for record in read_metrics(run) if "eval_loss" in record}
    assert evaluated == {2: 1.25, 4: 4.0, 6: 6.0}
    assert History.read(run).curves["eval_loss"] == [(2, 1.25), (4, 4.0), (6, 6.0)]
    assert commands.main(["report", str(run)]) == 0
    assert "held out, lowest 1.2500 at step 2" in (run / "report.html").read_text()


@pytest.mark.parametrize("deleted", [True, False])
def test_a_checkpoint_that_cannot_be_read(deleted, run, monkeypatch, capsys):
    def evaluate(run, folder, *_):
        if folder.name.endswith("4"):
            if deleted:
                folder.rmdir()
            raise CheckpointError("no such file")
        return {"eval_loss": 1.0}

    monkeypatch.setattr(watch, "_evaluate", evaluate)
    if deleted:
        assert watch.run(run, None, False) == 0 and steps_watched(run) == [2, 6]
        assert "deleted by checkpoint.keep" in capsys.readouterr().out
    else:
        with pytest.raises(CheckpointError):
            watch.run(run, None, False)
