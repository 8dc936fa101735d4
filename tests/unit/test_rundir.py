import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from samecurve import rundir
from samecurve.config import Recipe
from samecurve.errors import ConfigurationError, StorageError
from samecurve.rundir import RunDirectory, read_metrics, run_facts


def finished_run(path, loss=1.0):
    """A run that wrote everything; its lock is given back, as when its process ended."""
    run = RunDirectory(path)
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
    assert run.notice == f"an earlier run was in {tmp_path}: moved to {tmp_path / 'previous' / '2'}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "previous"]
    for number, loss in ((1, 1.0), (2, 2.0)):
        old = tmp_path / "previous" / str(number)
        assert read_metrics(old) == [{"step": 1, "loss": loss}]
        assert (old / "model" / "config.json").exists()


def test_new_directory_has_nothing_to_say(tmp_path):
    assert RunDirectory(tmp_path / "new").notice == ""


def test_live_run_is_not_touched(tmp_path):
    run = RunDirectory(tmp_path)
    run.append_metrics({"step": 1})
    code = f"from samecurve.rundir import RunDirectory; RunDirectory({str(tmp_path)!r})"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "another run is writing into" in second.stderr
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_somebody_elses_folder_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigurationError, match="holds model/ but no run.json"):
        RunDirectory(tmp_path)
    assert (tmp_path / "model").exists()


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

    monkeypatch.setattr(rundir.os, "fsync", full)
    with pytest.raises(StorageError) as error:
        run.status("done")
    expected = f"{tmp_path / 'status.json'}: No space left on device (errno {errno.ENOSPC}, ENOSPC)"
    assert str(error.value) == expected
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"


def test_path_that_is_a_file(tmp_path):
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(StorageError, match=f"{file}: File exists"):
        RunDirectory(file)


def test_facts_are_jsons_and_remember_the_command(tmp_path):
    recipe = Recipe.model_validate(
        {
            "output_dir": str(tmp_path),
            "steps": 2,
            "model": {"path": "m"},
            "data": {"path": "d"},
            "batch": {"global_batch_size": 4, "sequence_length": 8},
            "optimizer": {"learning_rate": 1e-3},
        }
    )
    strategy = SimpleNamespace(
        name="ddp", path=Path("configs/ddp.yaml"), deepspeed_path=None, family="ddp", launcher="torchrun"
    )
    strategy.accelerate, strategy.deepspeed = {"distributed_type": "MULTI_GPU"}, None
    typed = ["--local_rank=1", "r.yaml", "seed=1", "--strategy", "configs/ddp.yaml", "steps=2"]
    plan = SimpleNamespace(recipe=recipe, strategy=strategy)
    run = RunDirectory(tmp_path)
    run.write_run(run_facts(plan, typed, {"engine": "DistributedDataParallel"}, {"rows": 5}, "cpu"))
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["recipe_path"], facts["overrides"]) == ("r.yaml", ["seed=1", "steps=2"])
    assert (facts["strategy_path"], facts["engine"]) == ("configs/ddp.yaml", "DistributedDataParallel")
    assert facts["recipe"]["optimizer"]["betas"] == [0.9, 0.95]
    assert facts["versions"]["torch"] and facts["data"] == {"rows": 5}


def test_importing_needs_no_torch():
    code = "import sys, samecurve.rundir, samecurve.progress; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())
