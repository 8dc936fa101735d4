"""Scripts of examples/ with a loop of their own print the same curve under every strategy, and go on under another."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from harness import ROOT, Run, launch_command, long

SCRIPTS = ("nlp", "token_classification", "images")
STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")
CROSSINGS = [("single", 1, "zero2", 2), ("ddp", 2, "zero3", 2), ("fsdp", 2, "single", 1), ("zero2", 2, "fsdp", 3)]
CROSSINGS += [("zero3", 2, "ddp", 2)]
EVERY_DAY = [("nlp", "zero2"), ("images", *CROSSINGS[2])]
# the 7th of 9 micro-batches of the second epoch, and the first of two of its 4th step, behind step 8, which is saved
KILLED_AT = 16
STEPS, EPOCHS = 15, 3


@pytest.fixture(scope="module")
def train(workspace):
    def start(script: str, strategy: str, world: int, folder: Path, killed_at: int = 0, precision: str = "") -> Run:
        words = [f"examples/{script}.py", "--project_dir", str(folder)]
        words += ["--mixed_precision", precision] if precision else []
        if killed_at:
            words = ["tests/distributed/killed_script.py", str(killed_at), *words]
        launcher, path = ("accelerate", workspace.strategy(strategy)) if world > 1 else ("fork", None)
        command = launch_command(launcher, path, world, folder, words[0])
        return workspace.execute(command + words[1:], folder)

    return start


@pytest.fixture(scope="module")
def alone(train, workspace):
    @cache
    def read(script: str) -> dict[str, float]:
        run = train(script, "single", 1, workspace.folder / f"{script}_alone")
        assert_ended(run)
        curve = printed(run)
        assert len(curve) == STEPS + EPOCHS, run.output
        assert curve["epoch 2 eval_loss"] < 0.95 * curve["epoch 0 eval_loss"], curve
        return curve

    return read


def assert_ended(run: Run) -> None:
    # gloo's threads can abort a process in its destructors, when all is done: seen once, by the message below
    is_aborted = "terminate called without an active exception" in run.output
    assert run.returncode == 0 or (is_aborted and f"epoch {EPOCHS - 1} eval_loss" in run.output), run.output


def printed(run: Run) -> dict[str, float]:
    lines = re.findall(r"^(step \d+ grad_norm|epoch \d+ eval_loss) (\S+)", run.output, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def everyday(cells: list[tuple]) -> list:
    return [cell if cell in EVERY_DAY else long(cell)[0] for cell in cells]


@pytest.mark.parametrize(("script", "strategy"), everyday([*product(SCRIPTS, STRATEGIES)]))
def test_curve_of_two_processes_is_that_of_one(train, alone, tmp_path, script, strategy):
    run = train(script, strategy, 2, tmp_path)
    assert_ended(run)
    assert printed(run) == pytest.approx(alone(script), rel=1e-5)
    assert "the curve will depend" not in run.output


@pytest.mark.parametrize("strategy", long("zero2", "zero3"))
def test_losses_of_the_script_are_fp32_in_bf16(train, tmp_path, strategy):
    """DeepSpeed returns logits in bf16, of which a mean is rounded to 1 in 256."""
    losses = []
    for name, world in (("single", 1), (strategy, 2)):
        run = train("nlp", name, world, tmp_path / name, precision="bf16")
        assert_ended(run)
        losses.append([value for name, value in printed(run).items() if "eval_loss" in name])
    assert len(losses[0]) == EPOCHS and losses[1] == pytest.approx(losses[0], rel=5e-4)


@pytest.mark.parametrize(
    ("script", "strategy", "world", "other", "other_world"),
    everyday([(script, *crossing) for script, crossing in product(SCRIPTS, CROSSINGS)]),
)
def test_killed_run_goes_on_under_another_strategy(train, alone, tmp_path, script, strategy, world, other, other_world):
    killed = train(script, strategy, world, tmp_path, KILLED_AT)
    assert killed.returncode != 0 and "step 8 " in killed.output and "step 9 " not in killed.output, killed.output
    resumed = train(script, other, other_world, tmp_path)
    assert_ended(resumed)
    curves = printed(killed), printed(resumed)
    assert "step 9 grad_norm" == next(iter(curves[1]))
    assert curves[0] | curves[1] == pytest.approx(alone(script), rel=1e-5)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_short(script):
    lines = (ROOT / "examples" / f"{script}.py").read_text().splitlines()
    assert len(lines) <= 90 and "from samecurve import Accelerator" in lines
