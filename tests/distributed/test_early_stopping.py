"""Runs that end before their last step because evaluations got worse, and the export of the best checkpoint."""

from __future__ import annotations

import json

import pytest
from harness import long
from safetensors.torch import load_file
from torch.testing import assert_close

from samecurve.cli import commands

PATIENCE = 2
# a rate at which the loss rises again before the last step
RISES = ("optimizer.learning_rate=0.02", "schedule.name=constant", "evaluate.every_steps=2", "checkpoint.every_steps=2")
STOPS = (*RISES, "checkpoint.best=eval_loss", "checkpoint.keep=2", "export.checkpoint=best")
STOPS = (*STOPS, f"evaluate.patience={PATIENCE}", "export.verify=1B")


@pytest.fixture(scope="module")
def whole(workspace):
    run = workspace.run(None, 1, *RISES, "checkpoint.keep=99")
    assert run.returncode == 0, run.output
    return run


@pytest.fixture(scope="module")
def expected(whole) -> tuple[int, int]:
    """The best step and the last one, from the losses of the run that did not stop."""
    losses = {record["step"]: record["eval_loss"] for record in whole.metrics if "eval_loss" in record}
    best = min(losses)
    for step in sorted(losses):
        if losses[step] < losses[best]:
            best = step
        elif step == best + 2 * PATIENCE:
            break
    assert 2 < best and step < max(losses)
    return best, step


def check(run, whole, best: int, last: int, folder) -> None:
    assert run.returncode == 0, run.output
    assert [record["step"] for record in run.metrics] == list(range(1, last + 1))
    assert run.status["state"] == "done" and "patience" in run.status["reason"] and run.status["step"] == last
    assert json.loads((run.directory / "checkpoints" / "best.json").read_text())["checkpoint"] == f"step_{best:08d}"
    name, output = f"step_{best:08d}", folder / "expected"
    assert commands.main(["export", str(whole.directory), "--checkpoint", name, "--output", str(output)]) == 0
    exported = load_file(run.directory / "model" / "model.safetensors")
    assert_close(exported, load_file(output / "model.safetensors"), rtol=1e-4, atol=1e-5)
    assert f"| optimizer steps | {best} of" in (run.directory / "model" / "README.md").read_text()


def test_the_run_ends_and_exports_its_best_step(workspace, whole, expected, tmp_path):
    run = workspace.run(None, 1, *STOPS)
    check(run, whole, *expected, tmp_path)
    again = workspace.execute(
        ["fork", "0", "0", "train.py", str(workspace.recipe), f"output_dir={run.directory}", *STOPS], run.directory
    )
    assert again.returncode == 0 and "nothing to do" in again.output and "patience" in again.output


@pytest.mark.parametrize("strategy", ["fsdp", *long("zero3", "pipeline", "ddp")])
def test_a_resumed_run_goes_on_counting(strategy, workspace, whole, expected, tmp_path):
    run = workspace.resume(whole, expected[0], strategy, 2, *STOPS)
    check(run, whole, *expected, tmp_path)


def test_other_validation_rows_are_compared_with_themselves(workspace):
    """The first session evaluates what it trains on, the second characters that no document has."""
    other, seen = workspace.folder / "other.jsonl", workspace.folder / "seen.jsonl"
    seen.write_bytes((workspace.folder / "documents.jsonl").read_bytes())
    other.write_text(json.dumps({"text": "\u20ac\u00a7\u00df\u0416" * 20}) + "\n")
    every_step = ("data.validation_fraction=0", "evaluate.every_steps=1", "checkpoint.every_steps=1")
    every_step = (*every_step, "checkpoint.best=eval_loss", "export.enabled=false")
    first = workspace.run(None, 1, *every_step, "steps=6", f"evaluate.path={seen}")
    assert first.returncode == 0 and first.metrics, first.output
    given = [f"output_dir={first.directory}", *every_step, "steps=8", f"evaluate.path={other}"]
    run = workspace.execute(["fork", "0", "0", "train.py", str(workspace.recipe), *given], first.directory)
    assert run.returncode == 0, run.output
    assert run.output.count("changed: evaluation: ") == run.output.count("evaluating after step 6 first") == 1
    states = {step: json.loads((run.checkpoint(step) / "state.json").read_text()) for step in (6, 7, 8)}
    losses = {step: state["record"]["eval_loss"] for step, state in states.items()}
    best = min(losses, key=losses.__getitem__)
    assert losses[best] > first.metrics[-1]["eval_loss"]  # which would be better than all of them
    assert json.loads((run.directory / "checkpoints" / "best.json").read_text()) == {
        "checkpoint": run.checkpoint(best).name,
        "eval_loss": losses[best],
    }
    assert (states[8]["stopping"]["step"], states[8]["stopping"]["value"]) == (best, losses[best])
