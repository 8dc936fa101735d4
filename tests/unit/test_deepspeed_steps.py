"""What a script's optimizer does under DeepSpeed is what it does in one process, or is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from samecurve.accelerator.accelerator import Accelerator

PROBE = Path(__file__).with_name("deepspeed_steps_probe.py")
STRATEGIES = {"single", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}


@pytest.fixture(scope="module")
def results() -> dict:
    environment = os.environ | {"PYTHONPATH": str(PROBE.parents[2])}
    command = [sys.executable, str(PROBE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "RESULT " in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.split("RESULT ", 1)[1].splitlines()[0])


def assert_equal(weights: dict[str, list[float]]) -> None:
    for name, values in weights.items():
        assert values == pytest.approx(weights["single"], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("optimizer", ["SGD", "amsgrad", "maximize"])
def test_an_offloaded_optimizer_stays_the_scripts_own(optimizer, results):
    """Accelerate makes DeepSpeed's Adam of each."""
    weights = results["offloaded_optimizers"][optimizer]
    assert weights.keys() == {"single", "zero2", "zero2_offload"}
    assert_equal(weights)


@pytest.mark.parametrize("case", ["left_within_a_step", "loaded_within_a_step", "limits_of_single_steps"])
def test_nothing_of_another_step_enters_a_step(case, results):
    """Neither gradients that a loop or a loaded state left behind, nor a limit."""
    assert results[case].keys() == STRATEGIES
    assert_equal(results[case])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("part of the weights", "found 2 weights of the optimizer left out, and 0 that it does not train"),
        ("other norm", "found norm_type inf"),
        ("second optimizer", "found 2 optimizers, but DeepSpeed trains with one; give the weights to one"),
        ("late scheduler", "DeepSpeed takes model, optimizer and scheduler in one call"),
        ("two schedulers", "found 2 schedulers"),
        ("without its model", "DeepSpeed takes model, optimizer and scheduler in one call"),
        ("ratio", "leave offload_optimizer or its ratio out"),
        ("of matrices", "optimizer: found Adafactor"),
    ],
)
def test_what_deepspeed_would_compute_otherwise_is_refused(what, said, results):
    assert said in results["refusals"][what]


def test_a_second_model_without_an_optimizer_is_none_of_these(results):
    assert results["refusals"]["teacher"] == ""


def test_a_loss_scale_grows_after_steps_that_were_taken():
    """Also in a script, as in the engines; test_fp16_zero.py has what DeepSpeed does otherwise."""
    grown, applied = [], iter([True, False, True])
    engine = SimpleNamespace(optimizer=SimpleNamespace(), _config=SimpleNamespace(), step=lambda: None)
    engine.was_step_applied = lambda: next(applied)
    steps = Accelerator.__new__(Accelerator)
    steps._is_script, steps.deepspeed_engine_wrapped = False, SimpleNamespace(engine=engine)
    steps._grow_scale, steps._file_max_norm = lambda: grown.append(True), 0.0
    for _ in range(3):
        steps._step_taken = False
        steps._take_deepspeed_step()
    assert grown == [True, True]
