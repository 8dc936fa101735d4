"""Whole runs whose export is not the trained model: what they leave behind, and how the same command goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Run, Workspace, launch_command
from safetensors.torch import load_file
from test_export_verified import verified

from samecurve.checkpoint.manifest import folder_name, list_checkpoints
from samecurve.storage.filesystem import LocalFileSystem

pytestmark = pytest.mark.full  # test_export_verification.py has the parts every day

SETTINGS = ("steps=4", "schedule.warmup_steps=1", "evaluate.every_steps=0", "checkpoint.every_steps=2")
SETTINGS += ("batch.micro_batch_size=2",)
WRONG = str(Path(__file__).with_name("wrong_export_train.py"))
CODES = {"epsilon": 5, "family": 4}
ERRORS = {"epsilon": "NumericError (exit code 5)", "family": "CheckpointError (exit code 4)"}
SAID = {"epsilon": "its logits differ from the trained model's by up to", "family": "transformers cannot load it"}
SAFE = "The run's checkpoints are complete; with export.verify=off the same command exports without this check."


def start(
    workspace: Workspace, directory: Path, strategy: str | None, *overrides: str, script: str = "train.py", wrong=""
) -> Run:
    path = workspace.strategy(strategy) if strategy else None
    command = [*launch_command("fork", path, 2, workspace.folder, script), str(workspace.recipe), *SETTINGS]
    command += [f"output_dir={directory}", *overrides, *(["--strategy", str(path)] if path else [])]
    return workspace.execute(command, directory, SAMECURVE_WRONG_EXPORT=wrong)


def assert_same_weights(folder: Path, golden: Run) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == golden.weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in golden.weights.items())


def assert_rejected(run: Run, golden: Run, wrong: str, several: bool) -> None:
    """The launcher makes 1 of a worker's exit code; status.json keeps it."""
    assert run.returncode == (1 if several else CODES[wrong]), run.output
    status = run.status
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", CODES[wrong], 4)
    rejected = run.directory / "rejected_model"
    for text in (run.output, status["reason"]):
        assert f"{rejected}: the exported model was moved here, because" in text and SAID[wrong] in text
        assert SAFE in text, text
    assert run.output.count(ERRORS[wrong]) == 1 and "Traceback (most recent" not in run.output.split(ERRORS[wrong])[0]
    assert "the trained model is in" not in run.output
    assert not [path for path in run.directory.iterdir() if path.name.startswith("model")]
    assert_same_weights(rejected, golden)
    assert run.checkpoint(4).is_dir() and run.column("loss") == golden.column("loss")


@pytest.mark.parametrize("wrong", CODES)
@pytest.mark.parametrize("strategy", [None, "ddp", "zero3"])
def test_the_same_command_exports_again(strategy, wrong, workspace, tmp_path):
    golden = start(workspace, workspace.folder / f"export_{strategy}", strategy)
    assert golden.returncode == 0, golden.output
    directory, verify = tmp_path / "run", "export.verify=1M"
    for session in (1, 2):  # as long as the fault is there, and without training again
        run = start(workspace, directory, strategy, verify, script=WRONG, wrong=wrong)
        assert_rejected(run, golden, wrong, strategy is not None)
        assert (f"resuming after step 4 in {directory}" in run.output) == (session == 2)
    assert_same_weights(directory / "previous" / "1" / "rejected_model", golden)
    run = start(workspace, directory, strategy, verify, "--resume", "auto")
    kind, difference, _ = verified(run)
    assert kind == "logits" and difference < 1e-5
    assert (run.status["state"], run.status["exit_code"]) == ("done", 0)
    assert_same_weights(directory / "model", golden)
    assert run.column("loss") == golden.column("loss")


@pytest.mark.parametrize("strategy", [None, "ddp"])
def test_the_last_checkpoint_is_uploaded_all_the_same(strategy, workspace, tmp_path):
    golden = start(workspace, workspace.folder / f"export_{strategy}", strategy)
    directory, store = tmp_path / "run", tmp_path / "store"
    settings = "export.verify=1M", f"checkpoint.mirror=file://{store}"
    run = start(workspace, directory, strategy, *settings, script=WRONG, wrong="epsilon")
    assert_rejected(run, golden, "epsilon", strategy is not None)
    assert list_checkpoints(LocalFileSystem(), store / "checkpoints")[0].name == folder_name(4)


def test_without_the_check_it_is_exported_as_it_is(workspace, tmp_path):
    """As the message says; whoever turns the check off has read it."""
    golden = start(workspace, workspace.folder / "export_None", None)
    directory = tmp_path / "run"
    rejected = start(workspace, directory, None, "export.verify=1M", script=WRONG, wrong="epsilon")
    assert_rejected(rejected, golden, "epsilon", several=False)
    run = start(workspace, directory, None, "--resume", "auto", script=WRONG, wrong="epsilon")
    assert run.returncode == 0 and f"resuming after step 4 in {directory}" in run.output, run.output
    assert_same_weights(directory / "model", golden)


def test_without_a_checkpoint_nothing_is_promised(workspace, tmp_path):
    directory = tmp_path / "run"
    settings = "checkpoint.every_steps=0", "export.verify=1M"
    run = start(workspace, directory, None, *settings, script=WRONG, wrong="epsilon")
    assert run.returncode == 5 and not list(directory.glob("checkpoints/*")), run.output
    assert "checkpoints are complete" not in run.output
    assert "so this folder has the only copy of the trained weights; the same command trains again" in run.output
