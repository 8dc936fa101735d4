"""Trackers hold what metrics.jsonl has: every field of every step of a run, read back by their own packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, STEPS, launch_command
from test_recipes import RECIPES, file, started
from test_router_curves import MODEL, SHORT
from tracked import UNLOGGED, assert_equal_to_metrics, expected_scalars, tensorboard_scalars

__all__ = ["file"]  # a fixture

FLOAT32 = 2**-23  # TensorBoard keeps values in single precision
PACKAGES = os.environ.get("SAMECURVE_TRACKERS", "")
STORES = {"file": "file://{}/mlruns", "sqlite": "sqlite:///{}/mlflow.db"}


def test_tensorboard_holds_every_metric_of_every_step(reference):
    found = tensorboard_scalars(reference.directory)
    assert_equal_to_metrics(found, reference.metrics, FLOAT32)
    assert list(found["train/loss"]) == list(range(1, STEPS + 1))
    assert list(found["evaluate/eval_loss"]) == [10, 20, 25]  # every 10 steps, and after the last one


def test_tensorboard_holds_the_router_metrics(workspace):
    run = workspace.run(None, 1, MODEL, "model.router_loss=batch", *SHORT, "batch.micro_batch_size=8")
    assert run.returncode == 0, run.output
    found = tensorboard_scalars(run.directory)
    assert_equal_to_metrics(found, run.metrics, FLOAT32)
    assert found.keys() >= {"train/router_loss", "train/expert_share_max"}
    left_out = run.metrics[0].keys() - expected_scalars(run.metrics).keys()
    assert left_out == UNLOGGED.keys()


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_tensorboard_holds_the_metrics_of_every_task(recipe, workspace, file):
    if recipe == "qlora":
        pytest.importorskip("bitsandbytes")
    run = started(workspace, file, recipe, None)
    assert_equal_to_metrics(tensorboard_scalars(run.directory), run.metrics, FLOAT32)


@pytest.mark.full
@pytest.mark.skipif(not PACKAGES, reason="scripts/test.sh --full installs wandb and mlflow and sets SAMECURVE_TRACKERS")
@pytest.mark.parametrize("store", STORES)
def test_mlflow_and_wandb_hold_every_metric_of_every_step(store, workspace, tmp_path):
    """Of two sessions under a strategy, without a network."""
    directory, uri, path = tmp_path / "run", STORES[store].format(tmp_path), workspace.strategy("ddp")
    environment = {"PYTHONPATH": f"{ROOT}:{PACKAGES}", "MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    environment |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [*launch_command("torchrun", path, 2, workspace.folder), str(workspace.recipe), "--strategy", str(path)]
    command += ["logging.trackers=[tensorboard, mlflow, wandb]", f"output_dir={directory}", "evaluate.every_steps=3"]
    command += ["export.enabled=false", "schedule.warmup_steps=1"]
    for steps in (4, 7):
        run = workspace.execute([*command, f"steps={steps}"], directory, **environment)
        assert run.returncode == 0 and "the run goes on without" not in run.output, run.output
    assert run.facts["engine"] == "DistributedDataParallel" and run.column("step") == list(range(1, 8))
    script = str(Path(__file__).with_name("tracked_reader.py"))
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, script, str(directory), uri], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.split("READ ", 1)[1])
    assert (tmp_path / "mlruns").is_dir() == (store == "file")
    for name in ("mlflow", "wandb"):
        found = {tag: {int(step): value for step, value in values.items()} for tag, values in read[name].items()}
        assert_equal_to_metrics(found, run.metrics, rel=1e-12)
    assert_equal_to_metrics(tensorboard_scalars(directory), run.metrics, FLOAT32)
