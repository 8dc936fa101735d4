import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_console import ENGINE
from tiny_recipes import make_recipe

from samecurve.checkpoint.resume import _SCHEMA
from samecurve.errors import CheckpointError, ConfigurationError, RepeatedFailureError, StorageError
from samecurve.models.weights import ModelDescription
from samecurve.run.metadata import RunFacts
from samecurve.run.run_directory import METRICS_LINE, WATCHED, RunDirectory, read_metrics
from samecurve.storage import atomic
from samecurve.storage.jsonl import JsonlFile
from samecurve.storage.records import mismatch
from samecurve.strategy.launchers import continues_own_run
from samecurve.strategy.plan import Strategy


def finished_run(path, loss=1.0):
    """A run that wrote everything; its lock is given back, as when its process ended."""
    run = RunDirectory(path)
    run.begin()
    run.write_run({"strategy": "ddp"})
    run.append_metrics({"step": 1, "loss": loss})
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    run.status("done", step=1, exit_code=0)
    run.close()
    return run


def test_writes_what_it_was_told(tmp_path):
    run = finished_run(tmp_path / "runs" / "a")
    status = json.loads((run.path / "status.json").read_text())
    assert (status["state"], status["reason"], status["step"], status["exit_code"]) == ("done", "", 1, 0)
    assert json.loads((run.path / "run.json").read_text()) == {"strategy": "ddp"}
    assert read_metrics(run.path) == [{"step": 1, "loss": 1.0}]
    assert not list(run.path.glob("*.partial"))


def test_metrics_of_another_version_are_whole(tmp_path):
    """It may write texts, lists and more beside the numbers: its lines and its checkpoints count."""
    more = {"note": "x", "ready": True, "stage_seconds": [1.0, None], "parts": {"a": 1}}
    lines = [{"step": step, "loss": 0.5, "eval_loss": 1.5} | more for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == [{"step": step, "loss": 0.5, "eval_loss": 1.5} for step in (1, 2)]
    assert JsonlFile(tmp_path / "metrics.jsonl", METRICS_LINE).truncate(3, tmp_path) == (0, 0)
    assert not mismatch(lines[0], _SCHEMA["record"])


def test_metrics_are_strict_json(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_metrics({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    run.append_metrics({"step": 2, "loss": 0.5, "grad_norm": 1.0, "mfu": 0.25})
    lines = run.metrics.read_text().splitlines()
    assert lines[0] == '{"step": 1, "loss": null, "grad_norm": null, "mfu": null}'
    assert json.loads(lines[1]) == {"step": 2, "loss": 0.5, "grad_norm": 1.0, "mfu": 0.25}


def test_second_run_moves_the_first_aside(tmp_path):
    for loss in (1.0, 2.0):
        finished_run(tmp_path, loss)
    run = RunDirectory(tmp_path)
    run.begin()
    assert run.notice == f"moved the files of an earlier run in {tmp_path} to {tmp_path / 'previous' / '2'}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "previous", "status.json"]
    for number, loss in ((1, 1.0), (2, 2.0)):
        old = tmp_path / "previous" / str(number)
        assert read_metrics(old) == [{"step": 1, "loss": loss}]
        assert (old / "model" / "config.json").exists()


def test_new_directory_has_nothing_to_say(tmp_path):
    assert RunDirectory(tmp_path / "new").notice == ""


def test_live_run_is_not_touched(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_metrics({"step": 1})
    code = f"from samecurve.run.run_directory import RunDirectory; RunDirectory({str(tmp_path)!r})"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another run is writing into" in second.stderr
    assert not (tmp_path / "status.json").exists()  # the live run's to write
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_somebody_elses_folder_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigurationError, match="holds model/ but no run.json"):
        RunDirectory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".lock"}


def test_what_the_run_reads_is_not_moved(tmp_path):
    run = finished_run(tmp_path)
    with pytest.raises(ConfigurationError, match="which this run reads"):
        RunDirectory(tmp_path, reads=[None, run.model])
    assert (run.model / "config.json").exists()


def test_other_ranks_write_nothing(tmp_path):
    run = RunDirectory(tmp_path / "a", is_main=False)
    run.write_run({})
    run.append_metrics({"step": 7})
    run.status("done")
    assert not run.path.exists() and run.step == 7
    assert run.model == tmp_path / "a" / "model"


def test_full_disk_names_path_and_errno(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    run.status("running")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(StorageError) as error:
        run.status("done")
    expected = f"{tmp_path / 'status.json'}: No space left on device (errno {errno.ENOSPC}, ENOSPC)"
    assert str(error.value).startswith(expected)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"


def test_path_that_is_a_file(tmp_path):
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(StorageError, match=f"output_dir: {file} is a file, expected a folder"):
        RunDirectory(file)


def test_facts_are_jsons_and_remember_the_command(tmp_path):
    strategy = Strategy(
        "ddp",
        distributed=True,
        path=Path("configs/ddp.yaml"),
        launcher="torchrun",
        accelerate={"distributed_type": "MULTI_GPU"},
    )
    plan = SimpleNamespace(
        recipe=make_recipe(tmp_path, "d"),
        strategy=strategy,
        recipe_path="r.yaml",
        overrides=("seed=1", "steps=2"),
        notes=(),
        from_strategy=[],
        no_effect=[],
    )
    run = RunDirectory(tmp_path)
    engine = replace(ENGINE, engine="DistributedDataParallel")
    model = ModelDescription(model_type="llama", attention="sdpa")
    run.write_run(RunFacts(plan=plan, engine=engine, model=model, data={"rows": 5}, device="cpu").to_json())
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["recipe_path"], facts["overrides"]) == ("r.yaml", ["seed=1", "steps=2"])
    assert (facts["strategy_path"], facts["engine"]) == ("configs/ddp.yaml", "DistributedDataParallel")
    assert facts["recipe"]["optimizer"]["betas"] == [0.9, 0.95]
    assert facts["versions"]["torch"] and facts["data"] == {"rows": 5}


def test_importing_needs_no_torch():
    code = "import sys, samecurve.run.run_directory, samecurve.metrics.console; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())


def interrupted_run(path, num_steps=7, saved=(2, 4, 6), state="running"):
    """A run that was killed after some steps, with checkpoints; its last line is half written."""
    run = RunDirectory(path)
    run.write_run({"strategy": "ddp"})
    run.status(state, step=0)
    for step in range(1, num_steps + 1):
        run.append_metrics({"step": step, "loss": float(step)})
    with open(run.metrics, "a") as stream:
        stream.write('{"step": 8, "lo')
    for step in saved:
        (run.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    run.close()


def test_going_on_leaves_no_gap_and_no_double_step(tmp_path):
    interrupted_run(tmp_path)
    watched = [{"step": step, "eval_loss": step / 2} for step in (2, 4, 6)]
    (tmp_path / WATCHED).write_text("".join(json.dumps(record) + "\n" for record in watched))
    run = RunDirectory(tmp_path, resume="auto")
    assert run.continues and run.notice == ""
    run.begin(4, {"step": 4, "loss": 4.0})
    assert (tmp_path / WATCHED).read_text().count("step") == 2  # step 6 is trained again
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    run.append_metrics({"step": 5, "loss": 5.5})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert run.metrics.read_text().endswith('{"step": 5, "loss": 5.5}\n')
    old = tmp_path / "previous" / "1"
    assert [record["step"] for record in read_metrics(old)] == [5, 6, 7]
    assert sorted(path.name for path in old.iterdir()) == sorted(
        ["checkpoints", WATCHED, "metrics.jsonl", "run.json", "status.json"]
    )
    assert [path.name for path in (old / "checkpoints").iterdir()] == ["step_00000006"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_00000002", "step_00000004"]
    assert "3 steps after the checkpoint" in run.notice and run.notice.endswith("moved there too: 1")


def test_a_line_without_the_evaluation_made_later_is_replaced(tmp_path):
    interrupted_run(tmp_path)
    evaluated = {"step": 4, "loss": 4.0, "eval_loss": 4.5}
    RunDirectory(tmp_path, resume="auto").begin(4, evaluated)
    assert read_metrics(tmp_path)[2:] == [{"step": 3, "loss": 3.0}, evaluated]
    assert [record["step"] for record in read_metrics(tmp_path / "previous" / "1")] == [4, 5, 6, 7]


def test_what_was_made_of_the_earlier_model_moves_with_it(tmp_path):
    interrupted_run(tmp_path)
    for name in ("model", "merged", "model-bf16", "merged-gguf-fp32"):
        (tmp_path / name).mkdir()
    RunDirectory(tmp_path, resume="auto").begin(4, {"step": 4, "loss": 4.0})
    assert {"model", "merged", "model-bf16", "merged-gguf-fp32"} <= {
        path.name for path in (tmp_path / "previous" / "1").iterdir()
    }
    assert not (tmp_path / "merged").exists()


def test_a_line_that_a_power_cut_took_comes_back_from_the_checkpoint(tmp_path):
    interrupted_run(tmp_path, num_steps=3, saved=(4,))
    run = RunDirectory(tmp_path, resume="auto")
    run.begin(4, {"step": 4, "loss": 4.0})
    assert read_metrics(tmp_path)[-1] == {"step": 4, "loss": 4.0}


@pytest.mark.parametrize("resume", ["none", "elsewhere"])
def test_checkpoints_are_not_left_behind_without_being_told_to(resume, tmp_path):
    interrupted_run(tmp_path, state="preempted")
    before = json.loads((tmp_path / "status.json").read_text())
    with pytest.raises(CheckpointError, match=f"--resume {resume} would leave behind; .* --fresh"):
        RunDirectory(tmp_path, resume=resume)
    assert len(list(tmp_path.glob("checkpoints/*"))) == 3
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["refused_start"]["exit_code"] == 4 and told["refused_start"]["reason"].startswith("output_dir: ")
    assert told == before | {"refused_start": told["refused_start"]}


def test_a_checkpoint_that_is_a_link_is_told(tmp_path):
    """It would not be listed, and the run would begin anew beside it."""
    interrupted_run(tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        folder.rename(tmp_path / folder.name)
        folder.symlink_to(tmp_path / folder.name)
    with pytest.raises(CheckpointError, match="step_00000002, .* links are not followed; move the folder itself"):
        RunDirectory(tmp_path / "run", resume="auto")


def test_starting_over_moves_checkpoints_aside(tmp_path):
    interrupted_run(tmp_path)
    run = RunDirectory(tmp_path, resume="none", fresh=True)
    assert len(list(tmp_path.glob("checkpoints/*"))) == 3
    run.begin()
    assert not run.continues and not run.checkpoints.exists()
    assert len(list(tmp_path.glob("previous/1/checkpoints/*"))) == 3


def test_one_of_its_own_checkpoints_may_be_chosen(tmp_path):
    interrupted_run(tmp_path)
    run = RunDirectory(tmp_path, resume=str(tmp_path / "checkpoints" / "step_00000002"))
    assert run.continues


def test_the_third_restart_at_one_step_is_the_last(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    interrupted_run(tmp_path, num_steps=7)
    for _ in range(2):  # each comes to step 7 again and dies
        run = RunDirectory(tmp_path, resume="auto")
        run.status("running")
        run.close()
    with pytest.raises(RepeatedFailureError, match="step 8 failed 3 times in a row"):
        RunDirectory(tmp_path, resume="auto")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")  # a person may try again
    assert RunDirectory(tmp_path, resume="auto").continues


def test_failures_at_different_steps_do_not_add_up(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    interrupted_run(tmp_path, num_steps=7)
    for step in (8, 9, 10, 11):
        run = RunDirectory(tmp_path, resume="auto")
        run.status("failed", reason="x")
        run.begin(step - 1, {})
        run.append_metrics({"step": step})
        run.status("failed", reason="x")
        run.close()


def test_a_run_that_was_told_to_stop_did_not_fail(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    interrupted_run(tmp_path, state="preempted")
    for _ in range(4):
        run = RunDirectory(tmp_path, resume="auto")
        run.status("preempted")
        run.close()


@pytest.mark.parametrize("exit_code", [130, 143])
def test_what_a_signal_ended_is_not_counted_as_a_failure(exit_code, tmp_path, monkeypatch):
    """Outside the loop there is nothing to save: a run that is told to stop there has failed, but not its step."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    interrupted_run(tmp_path, num_steps=7)  # the first failure at step 8

    def start_and_end(code):
        run = RunDirectory(tmp_path, resume="auto")
        run.status("running")
        run.status("failed", reason="ended", exit_code=code)
        run.close()
        return json.loads((tmp_path / "status.json").read_text())["refused_start"]["failures"]

    assert [start_and_end(exit_code) for _ in range(4)] == [1] * 4
    assert [start_and_end(1), start_and_end(exit_code), start_and_end(exit_code)] == [1, 2, 2]
    start_and_end(124)
    with pytest.raises(RepeatedFailureError, match="step 8 failed 3 times in a row"):
        RunDirectory(tmp_path, resume="auto")


DAMAGED = [
    b"",
    b"half {",
    b"[1]",
    b'{"state": "\xff"}',
    b'{"state": "done", "earlier": 7}',
    b'{"state": "done", "refused_start": [4]}',
    b'{"state": ["done"], "exit_code": "0"}',
]


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_damaged_status_stops_no_start_and_is_kept(content, fresh, tmp_path):
    interrupted_run(tmp_path)
    (tmp_path / "status.json").write_bytes(content)
    for _ in range(2):  # also by a start that is refused
        refused = RunDirectory(tmp_path, resume="auto", fresh=fresh)
        assert not refused.is_done
        refused.status("running")
        refused.status("failed", "other data", exit_code=3)
        refused.close()
    RunDirectory(tmp_path, resume="auto", fresh=fresh).begin(0 if fresh else 6)
    kept = json.loads((tmp_path / "previous" / "1" / "status.json").read_text())
    assert kept == {"damaged": content.decode(errors="backslashreplace") or "the file is empty"}
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"


@pytest.mark.parametrize("state", ["done", "preempted"])
def test_a_rank_that_replaces_rank_0_keeps_the_state_of_the_earlier_run(state, tmp_path):
    """Rank 0 was killed before the start was accepted, and in the place of a preempted run it had written its own."""
    interrupted_run(tmp_path, state=state)
    killed = RunDirectory(tmp_path, resume="auto")
    killed.status("running")
    RunDirectory(tmp_path, is_main=False).status("failed", "rank 0 died", exit_code=1, force=True)
    told = json.loads((tmp_path / "status.json").read_text())
    assert (told["state"], told["refused_start"]["reason"]) == (state, "rank 0 died") and "earlier" not in told


def test_a_restart_that_is_refused_for_ever_keeps_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    interrupted_run(tmp_path, state="preempted")
    for _ in range(3):
        run = RunDirectory(tmp_path, resume="auto")
        run.status("failed", "other data", exit_code=3)
        run.close()
    for _ in range(2):
        with pytest.raises(RepeatedFailureError, match="it is not tried again; the last time: other data$"):
            RunDirectory(tmp_path, resume="auto")
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "preempted"


@pytest.mark.parametrize("content", DAMAGED)
def test_a_rank_that_replaces_rank_0_writes_over_a_damaged_status(content, tmp_path):
    run = RunDirectory(tmp_path, is_main=False)
    (tmp_path / "status.json").write_bytes(content)
    run.status("failed", "rank 0 died", exit_code=1, force=True)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["reason"] == "rank 0 died" and "earlier" not in status


def test_failures_are_counted_on_beside_folders_of_other_names(tmp_path, monkeypatch):
    """Killed after it had set the earlier status aside: the count is in previous/, where a person has a folder too."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    interrupted_run(tmp_path)
    (tmp_path / "status.json").unlink()
    for name, failures in (("1", 0), ("2", 2), ("1_old", 0), ("old", 0), ("²", 0)):
        folder = tmp_path / "previous" / name
        folder.mkdir(parents=True)
        (folder / "status.json").write_text(json.dumps({"state": "failed", "failing_step": 8, "failures": failures}))
    with pytest.raises(RepeatedFailureError, match="step 8 failed 3 times in a row"):
        RunDirectory(tmp_path, resume="auto")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    RunDirectory(tmp_path, resume="auto").begin(6)
    assert (tmp_path / "previous" / "3" / "run.json").exists()


def everything(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("saved", [(), (1,)])
def test_a_refused_start_leaves_a_finished_run_as_it_is(saved, tmp_path):
    run = finished_run(tmp_path)
    for step in saved:
        (run.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    before = everything(tmp_path)
    refused = RunDirectory(tmp_path, resume="auto")
    assert refused.is_done
    refused.status("running")
    refused.status("failed", "other data", exit_code=3)
    refused.close()
    after, told = everything(tmp_path), json.loads((tmp_path / "status.json").read_text())
    why = told.pop("refused_start")
    assert (why["reason"], why["exit_code"]) == ("other data", 3)
    assert told == json.loads(before[Path("status.json")])
    assert {**after, Path("status.json"): None} == {**before, Path("status.json"): None}
    accepted = RunDirectory(tmp_path, resume="auto")
    assert accepted.is_done
    accepted.status("running")
    accepted.begin(1 if saved else 0, {})
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    old = tmp_path / "previous" / "1"
    assert (old / "status.json").read_bytes() == before[Path("status.json")] and (old / "model").is_dir()


def test_a_refused_start_is_not_taken_for_how_the_earlier_session_ended(tmp_path):
    interrupted_run(tmp_path, state="preempted")
    for _ in range(2):
        refused = RunDirectory(tmp_path, resume="auto")
        refused.status("running")
        refused.status("failed", "other data", exit_code=3)
        refused.close()
    told = json.loads((tmp_path / "status.json").read_text())
    assert (told["state"], told["refused_start"]["exit_code"]) == ("preempted", 3)
    RunDirectory(tmp_path, resume="auto").begin(6, {})
    earlier = json.loads((tmp_path / "previous" / "1" / "status.json").read_text())
    assert earlier["state"] == "preempted" and "refused_start" not in earlier
    assert not {"earlier", "refused_start"} & json.loads((tmp_path / "status.json").read_text()).keys()


def test_a_run_that_goes_on_may_not_read_what_it_moves(tmp_path):
    run = finished_run(tmp_path)
    (run.checkpoints / "step_00000001").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="which this run reads"):
        RunDirectory(tmp_path, reads=[run.model], resume="auto")


def test_a_restart_of_one_that_starts_over_does_not_go_on_from_what_it_was_to_leave(tmp_path):
    interrupted_run(tmp_path)
    restart = {"TORCHELASTIC_RESTART_COUNT": "1"}
    run = RunDirectory(tmp_path, fresh=True)
    run.close()  # it died before it began
    assert not continues_own_run(restart, str(tmp_path))
    run = RunDirectory(tmp_path, fresh=True)
    run.begin()
    (run.checkpoints / "step_00000002").mkdir(parents=True)
    assert continues_own_run(restart, str(tmp_path)) and not continues_own_run({}, str(tmp_path))


def test_a_restart_of_one_that_goes_back_goes_back_too(tmp_path):
    interrupted_run(tmp_path)
    restart = {"TORCHELASTIC_RESTART_COUNT": "1"}
    chosen = str(tmp_path / "checkpoints" / "step_00000002")
    run = RunDirectory(tmp_path, resume=chosen)
    run.close()  # it died before it began
    assert not continues_own_run(restart, str(tmp_path))
    run = RunDirectory(tmp_path, resume=chosen)
    run.begin(2, {})
    assert continues_own_run(restart, str(tmp_path))


def test_stacks_of_an_earlier_session_are_not_mixed_with_this_ones(tmp_path):
    interrupted_run(tmp_path)
    for text in ("of the first", "of the second"):
        run = RunDirectory(tmp_path, resume="auto")
        (tmp_path / "stacks").mkdir()  # opened before it begins
        (tmp_path / "stacks" / "rank_00000.txt").write_text(text)
        run.begin(2, {})
        assert (tmp_path / "stacks" / "rank_00000.txt").read_text() == text
        run.close()
    assert (tmp_path / "previous" / "2" / "stacks" / "rank_00000.txt").read_text() == "of the first"
    assert (tmp_path / "previous" / "2" / "status.json").exists()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A run whose checkpoints/ is a link to another disk."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    interrupted_run(run)
    for folder in (run / "checkpoints").iterdir():
        (folder / "a").write_text(folder.name)
        (folder / "b").write_text(folder.name)
    shutil.move(run / "checkpoints", disk)
    (run / "checkpoints").symlink_to(disk)
    rename = os.rename

    def within_a_disk(old, new):
        if Path(old).parent.resolve() == disk.resolve():
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(old), None, str(new))
        rename(old, new)

    monkeypatch.setattr(os, "rename", within_a_disk)
    return run


def test_checkpoints_on_another_disk_are_moved_too(elsewhere):
    RunDirectory(elsewhere, resume="auto").begin(4)
    assert sorted(path.name for path in elsewhere.glob("checkpoints/*")) == ["step_00000002", "step_00000004"]
    [moved] = elsewhere.glob("previous/1/checkpoints/*")
    assert moved.name == "step_00000006" and len(everything(moved)) == 2


@pytest.mark.parametrize("killed_in", ["copytree", "rmtree"])
def test_a_kill_on_the_way_to_another_disk_loses_no_checkpoint(killed_in, elsewhere, monkeypatch):
    def killed(folder, *target, **_):
        """After one of two files."""
        if target:
            Path(target[0]).mkdir()
            shutil.copy(folder / "a", target[0])
        else:
            (folder / "a").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, killed_in, killed)
        run = RunDirectory(elsewhere, resume="auto")
        with pytest.raises(KeyboardInterrupt):
            run.begin(4)
        run.close()
    again = RunDirectory(elsewhere, resume="auto")
    assert again.continues
    again.begin(4)
    assert sorted(path.name for path in elsewhere.glob("checkpoints/*")) == ["step_00000002", "step_00000004"]
    of_both = [len(everything(elsewhere / f"previous/{number}/checkpoints/step_00000006")) for number in (1, 2)]
    assert of_both == ([1, 2] if killed_in == "copytree" else [2, 1])
