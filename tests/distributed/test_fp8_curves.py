"""fp8 trains the curve of bf16 within its rounding, and the same one under every strategy that can have it.

On a CPU torchao computes with numbers that were rounded to 8 bits, in fp32.
"""

from __future__ import annotations

import importlib.util

import pytest
from harness import RECIPE, largest_relative_difference, long
from test_step_options import PLAIN, needs_compiler, probe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")

KINDS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LARGER = {"batch": {**RECIPE["batch"], "micro_batch_size": 4}}
CASES = {PLAIN: {}, **{kind: {"fp8": kind} for kind in KINDS}}
OTHERS = {
    "matmul": {"fp8": "tensorwise", "memory": {"activation_checkpointing": "selective"}},
    "full": {"fp8": "rowwise_with_gw_hp", "memory": {"activation_checkpointing": "full"}},
    "larger": {"fp8": "rowwise_with_gw_hp", **LARGER},
    "larger, plain": LARGER,
}
SAME_AS = {"matmul": "tensorwise", "full": "rowwise_with_gw_hp"}
MODULES = 4 * 7  # of 4 layers
# Measured over 3 steps: 3.0e-4 and 5.8e-3 from bf16; 8.7e-5 and 3.3e-3 from a single process, where a strategy rounds
# elsewhere than autocast does (3.9e-5 and 1.8e-3 without fp8).
FROM_BF16 = {"loss": 1e-3, "norm": 2e-2, "eval_loss": 1e-3}
FROM_SINGLE = {"loss": 5e-4, "norm": 1e-2, "eval_loss": 5e-4}
ALIKE = dict.fromkeys(FROM_BF16, 1e-6)  # DDP computes what one process does


def assert_near(found: dict, reference: dict, tolerance: dict[str, float]) -> None:
    for key, limit in tolerance.items():
        assert found[key] == pytest.approx(reference[key], rel=limit), key


@pytest.fixture(scope="module")
def single(workspace) -> dict:
    return probe(workspace, "single", CASES | OTHERS, "precision=bf16")


def assert_fp8(found: dict, num_modules: int = MODULES) -> None:
    assert found[PLAIN]["fp8_modules"] == 0
    for kind in KINDS:
        assert found[kind]["fp8_modules"] == num_modules
        assert found[kind]["loss"][0] != found[PLAIN]["loss"][0]
        assert_near(found[kind], found[PLAIN], FROM_BF16)


def test_near_bf16(single):
    assert_fp8(single)
    for case, same in SAME_AS.items():
        assert single[case]["mlp_calls"] == 2 * single[same]["mlp_calls"]
        assert_near(single[case], single[same], ALIKE)
    assert_near(single["larger"], single["rowwise_with_gw_hp"], {"loss": 1e-4, "norm": 5e-3})


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [("fsdp", FROM_SINGLE), *long(("ddp", ALIKE), ("zero2", FROM_SINGLE), ("pipeline", FROM_SINGLE))],
)
def test_the_same_under_each_strategy(strategy, tolerance, workspace, single):
    found = probe(workspace, strategy, CASES, "precision=bf16")
    assert_fp8(found, MODULES // 2 if strategy == "pipeline" else MODULES)
    for kind in KINDS:
        assert_near(found[kind], single[kind], tolerance)


@needs_compiler
@pytest.mark.full
def test_compiled(workspace, single):
    cases = {PLAIN: {}, "regional": {"fp8": "rowwise_with_gw_hp", "compile": "regional"}}
    found = probe(workspace, "single", cases, "precision=bf16")["regional"]
    assert found["compiled"] > 0 and found["fp8_modules"] == MODULES
    assert_near(found, single["rowwise_with_gw_hp"], FROM_SINGLE)


@pytest.mark.full
def test_a_run_goes_on_without_it_and_exports_plain_weights(workspace):
    """Its checkpoint and its model are those of any other run; the header says what is computed how."""
    plain = workspace.run("ddp", 2, "precision=bf16")
    run = workspace.run("ddp", 2, "precision=bf16", "fp8=rowwise_with_gw_hp")
    assert run.returncode == 0, run.output
    assert f"{'fp8':<12}rowwise_with_gw_hp: the products of {MODULES} linear modules" in run.output
    assert (run.facts["num_fp8_modules"], plain.facts["num_fp8_modules"]) == (MODULES, 0)
    assert 0 < largest_relative_difference(run.column("loss"), plain.column("loss")) < 5e-3
    assert run.weights.keys() == plain.weights.keys()
    resumed = workspace.resume(run, 20, "fsdp", 2, "precision=bf16")
    assert resumed.returncode == 0, resumed.output
    assert "fp8: rowwise_with_gw_hp -> off" in resumed.output
    assert largest_relative_difference(resumed.column("loss")[20:], run.column("loss")[20:]) < 5e-3
