"""`evaluate --watch`: which checkpoints are evaluated, when it ends, and who reads the numbers."""

from __future__ import annotations

import json
import os
import signal

import pytest

from samecurve.bench import watch
from samecurve.cli import commands
from samecurve.errors import CheckpointError
from samecurve.reports.history import History
from samecurve.run.run_directory import WATCHED, read_metrics
from samecurve.storage.file_lock import lock_folder


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
    with lock_folder(tmp_path):
        yield tmp_path


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


@pytest.mark.parametrize("is_rewritten", [True, False])
def test_a_damaged_checkpoint_is_evaluated_once_it_is_rewritten(is_rewritten, run, monkeypatch, capsys):
    save = watch.time.sleep

    def rewrite(seconds: float) -> None:
        save(seconds)
        if is_rewritten and len(os.listdir(run / "checkpoints")) == 3:
            (run / "checkpoints" / "step_00000004" / "COMMITTED").write_text("again")

    def check(_, folder):
        return ["too short"] * (folder.name.endswith("4") and not (folder / "COMMITTED").exists())

    monkeypatch.setattr(watch.time, "sleep", rewrite)
    monkeypatch.setattr(watch, "check_files", check)
    assert watch.run(run, None, False) == 0
    assert sorted(steps_watched(run)) == ([2, 4, 6] if is_rewritten else [2, 6])
    assert capsys.readouterr().out.count("damaged, not evaluated: too short") == 1


def test_a_checkpoint_that_is_deleted_while_it_is_checked_is_not_damaged(run, monkeypatch, capsys):
    def check(_, folder):
        if folder.name.endswith("4"):
            folder.rmdir()
            return ["no such file"]
        return []

    monkeypatch.setattr(watch, "check_files", check)
    assert watch.run(run, None, False) == 0 and steps_watched(run) == [2, 6]
    said = capsys.readouterr().out
    assert "deleted by checkpoint.keep" in said and "damaged" not in said


def test_a_task_without_a_held_out_loss(run, monkeypatch, capsys):
    monkeypatch.setattr(watch, "_evaluate", lambda *_: {"eval_accuracy": 0.5})
    assert watch.run(run, None, False) == 0 and steps_watched(run) == [2, 4, 6]
    assert "step 2: evaluated" in capsys.readouterr().out


def test_a_killed_run_ends_it(run, monkeypatch, capsys):
    """Its status still says that it runs. A launcher may start it again, which takes a while."""
    polls = iter(range(watch.KILLED_POLLS + 1))
    monkeypatch.setattr(watch.time, "sleep", lambda _: next(polls))
    monkeypatch.setattr(watch, "lock_folder", lambda _: open(run / "status.json"))  # nobody has it
    assert watch.run(run, None, False) == 0 and steps_watched(run) == [2]
    assert "no process writes into" in capsys.readouterr().out and next(polls) >= watch.KILLED_POLLS - 1


def test_no_model_is_left_behind(run, monkeypatch):
    def kill(*_):
        assert len([*run.glob(".watch-*")]) == 1  # that of an earlier process is gone
        os.kill(os.getpid(), signal.SIGTERM)

    def refuse(*_):
        raise AssertionError("SIGTERM would have ended this process")

    (run / ".watch-old" / "model").mkdir(parents=True)
    monkeypatch.undo()
    monkeypatch.setattr(watch, "check_files", lambda *_: [])
    monkeypatch.setattr(watch, "read_state", lambda _: {"step": 2})
    monkeypatch.setattr(watch.folders, "parse_recipe", lambda *_: None)
    monkeypatch.setattr(watch.folders, "with_code", lambda *_: None)
    monkeypatch.setattr(watch, "from_checkpoint", kill)
    before = signal.signal(signal.SIGTERM, refuse)
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            watch.run(run, None, False)
        assert signal.getsignal(signal.SIGTERM) is refuse and not [*run.glob(".watch-*")]
    finally:
        signal.signal(signal.SIGTERM, before)
