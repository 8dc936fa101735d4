"""The first five minutes, made short: the script itself, what it ends with, and the command it prints to go on."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import ROOT, Run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from samecurve.inference.generator import load_generator
from samecurve.strategy.resolve import resolve_plan

SHORT = {"steps": 12, "schedule.warmup_steps": 2, "model.config.num_hidden_layers": 1, "evaluate.every_steps": 6}
ENVIRONMENT = ROOT / ".venv"

pytestmark = pytest.mark.skipif(
    Path(sys.prefix) != ENVIRONMENT, reason="quickstart.sh trains in .venv, which these tests do not run in"
)


@dataclass(frozen=True)
class Quickstart:
    run: Run
    commands: dict[str, str]  # what for: the line


@pytest.fixture(scope="module")
def quickstart(workspace) -> Quickstart:
    directory = workspace.folder / "quick start"
    short = [f"{key}={value}" for key, value in SHORT.items()]
    stamps = installed()
    run = workspace.execute(["bash", "scripts/quickstart.sh", *short, f"output_dir={directory}"], directory)
    assert run.returncode == 0, run.output
    assert not stamps or installed() == stamps
    return Quickstart(run, dict(re.findall(r"^(\w[\w ]*):\n  (.+)$", run.output, re.MULTILINE)))


def installed() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in ENVIRONMENT.glob(".installed_requirements.txt")}


def test_it_learns_and_says_so(quickstart):
    loss, held_out = quickstart.run.column("loss"), quickstart.run.metrics[-1]
    assert len(loss) == SHORT["steps"] and held_out["eval_loss"] > 0
    assert loss[-1] < 0.95 * loss[0]
    assert f"loss          {loss[0]:.4f} -> {loss[-1]:.4f} in 12 steps" in quickstart.run.output
    [told] = re.findall(r"^held out +loss [\d.]+ -> ([\d.]+), .*bits per byte ([\d.]+),", quickstart.run.output, re.M)
    assert told == (f"{held_out['eval_loss']:.4f}", f"{held_out['eval_bits_per_byte']:.4f}")


def test_it_shows_a_sample_and_where_everything_is(quickstart):
    directory = quickstart.run.directory
    before, after = quickstart.run.output.split("def ]")[1:]
    assert before != after and len(after.partition("\n== ")[0].split()) > 10
    shown = re.findall(r"<th>(before training|step 12)<td>\[import os", (directory / "report.html").read_text())
    assert shown == ["before training", "step 12"]
    assert f"run directory {directory}\n" in quickstart.run.output
    assert quickstart.commands["view the curves"] == f"tensorboard --logdir '{directory}/tensorboard'"
    events = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in ("train/loss", "train/grad_norm", "progress/tokens", "speed/step_seconds", "evaluate/eval_loss"):
        logged = {event.step: event.value for event in events.Scalars(name)}
        key = name.partition("/")[2]
        assert logged == pytest.approx({row["step"]: row[key] for row in quickstart.run.metrics if key in row})
    page = (directory / "report.html").read_text()
    assert page.count("<svg") >= 6 and (directory / "model" / "loss.svg").exists()
    assert quickstart.commands["write a report"] == f"python -m samecurve report '{directory}'"
    assert quickstart.commands["generate text"] == f"python -m samecurve generate '{directory}'"
    assert "source .venv/bin/activate" in quickstart.run.output


def test_the_sample_before_training_is_of_the_first_weights(quickstart):
    losses = {}
    for untrained in (True, False):
        generator = load_generator(quickstart.run.directory, untrained=untrained)
        ids = generator.encode([Path(shlex.__file__).read_text()[:300]], rendered=False)["input_ids"]
        losses[untrained] = generator.model(input_ids=ids, labels=ids).loss.item()
    first, last = quickstart.run.column("loss")[0], quickstart.run.column("loss")[-1]
    assert losses[True] == pytest.approx(first, abs=0.1) and losses[False] < (first + last) / 2


def test_a_guess_is_recorded_and_not_shown(quickstart):
    """The rates of a CPU that was not calibrated are assumed."""
    run, predicted = quickstart.run, quickstart.run.facts["predicted"]
    low, high = predicted["peak_memory_gib_interval"]
    assert low < max(run.column("peak_memory_gib")) < high
    low, high = predicted["step_seconds_interval"]
    assert low < predicted["step_seconds"] < high and predicted["job"]["gpu_kind"] == "cpu"
    page = (run.directory / "report.html").read_text()
    assert predicted["assumed"] and "predicted" not in run.output and "predicted" not in page


def test_the_other_commands_are_legal(quickstart, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(quickstart.commands["try another strategy"])
    assert words[:5] == ["accelerate", "launch", "--config_file", "configs/zero3.yaml", "--num_processes"]
    world = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": words[5]}
    plan = resolve_plan([*words[words.index("train.py") + 1 :], "--strategy", words[3]], world)
    assert plan.strategy.name == "zero3" and plan.recipe.steps == SHORT["steps"]
    assert quickstart.commands["compare the strategies"].startswith(
        "python -m samecurve compare recipes/quickstart.yaml "
    )


def test_the_printed_command_goes_on(quickstart, workspace):
    printed = quickstart.commands["start a run from its weights"]
    command = printed.replace(f"steps={SHORT['steps']}", "steps=4")
    assert command != printed
    again = workspace.execute(["bash", "-c", command], Path(f"{quickstart.run.directory}-continued"))
    assert again.returncode == 0, again.output
    assert again.facts["world_size"] == 2 and len(again.metrics) == 4
    # the same rows as the first run's first, which that run has learned from
    assert again.metrics[0]["loss"] < quickstart.run.metrics[0]["loss"] - 1
