"""Any number of devices and any micro-batch: 8 rows on 3 ranks, or 3 at a time, follow one process with all 8."""

from __future__ import annotations

import pytest
from harness import STEPS, largest_relative_difference, relative_l2
from test_equal_curves import ENGINES

LOSS, NORM, WEIGHTS = 1e-5, 1e-4, 1e-4
FULL = pytest.mark.full
CASES = [  # strategy, world, micro-batch size, rows of each micro-batch of each data-parallel rank
    (None, 1, 3, [[3, 3, 2]]),
    pytest.param("zero3", 3, 2, [[2, 1], [2, 1], [2, 0]], marks=FULL),
    ("pipeline", 4, 3, [[3, 1], [3, 1]]),
    pytest.param("ddp", 3, 2, [[2, 1], [2, 1], [2, 0]], marks=FULL),
    pytest.param("fsdp", 3, 2, [[2, 1], [2, 1], [2, 0]], marks=FULL),
    pytest.param("zero1", 3, 16, [[3], [3], [2]], marks=FULL),
    pytest.param("zero2", 3, 1, [[1, 1, 1], [1, 1, 1], [1, 1, 0]], marks=FULL),
    pytest.param("zero3_offload", 3, 3, [[3], [3], [2]], marks=FULL),
    pytest.param("hsdp", 4, 3, [[2]] * 4, marks=FULL),
    pytest.param("pipeline", 2, 3, [[3, 3, 2]], marks=FULL),
    pytest.param("pipeline", 6, 2, [[2, 1], [2, 1], [2, 0]], marks=FULL),
    pytest.param("tp", 2, 3, [[3, 3, 2]], marks=FULL),
    pytest.param("fsdp_tp", 6, 2, [[2, 1], [2, 1], [2, 0]], marks=FULL),
    pytest.param("fsdp_ulysses", 6, 2, [[2, 1], [2, 1], [2, 0]], marks=FULL),
    pytest.param("fsdp_cp", 6, 2, [[2, 1], [2, 1], [2, 0]], marks=FULL),
    pytest.param("pipeline_1f1b", 2, 3, [[3, 3, 2]], marks=FULL),
    pytest.param("pipeline_zbv", 2, 3, [[3, 3, 2]], marks=FULL),
    pytest.param("pipeline_fsdp", 6, 2, [[2, 1], [2, 1], [2, 0]], marks=FULL),
    pytest.param("ddp", 9, 4, [[1]] * 8 + [[0]], marks=FULL),
    pytest.param("fsdp", 9, 4, [[1]] * 8 + [[0]], marks=FULL),
    pytest.param("zero3", 9, 4, [[1]] * 8 + [[0]], marks=FULL),
]


def assert_same_curve(run, reference, start: int = 0) -> None:
    assert run.returncode == 0, run.output
    assert run.column("step") == list(range(1, STEPS + 1))
    for key in ("tokens", "samples", "learning_rate"):
        assert run.column(key) == reference.column(key), key
    for key, limit in (("loss", LOSS), ("grad_norm", NORM)):
        assert largest_relative_difference(run.column(key)[start:], reference.column(key)[start:]) < limit, key
    assert relative_l2(run.weights, reference.weights) < WEIGHTS
    found, expected = run.metrics[-1], reference.metrics[-1]
    assert found["eval_tokens"] == expected["eval_tokens"]
    assert abs(found["eval_loss"] / expected["eval_loss"] - 1) < LOSS


@pytest.mark.parametrize(("strategy", "world", "micro", "rows"), CASES)
def test_an_uneven_division_follows_the_reference(strategy, world, micro, rows, workspace, reference):
    run = workspace.run(strategy, world, f"batch.micro_batch_size={micro}")
    assert_same_curve(run, reference)
    facts = run.facts
    assert facts["engine"] == ENGINES[strategy or "single"]
    assert (facts["world_size"], facts["data_parallel_size"]) == (world, len(rows))
    assert facts["gradient_accumulation_steps"] == len(rows[0])
    header = run.output.partition("batch  ")[2].partition("\n")[0]
    assert header.strip().startswith("8 rows = " + " + ".join(("2 x 3", "2") if len(rows) == 1 else ())), header


@pytest.mark.parametrize(
    ("origin", "world"), [("ddp", 2), pytest.param("zero3", 2, marks=FULL), pytest.param("pipeline", 4, marks=FULL)]
)
def test_a_run_goes_on_with_three_devices(origin, world, workspace):
    before = workspace.run(origin, world, "batch.micro_batch_size=2")
    run = workspace.resume(before, 10, "fsdp", 3, "batch.micro_batch_size=2")
    assert_same_curve(run, before, start=10)
    assert run.facts["resumed_from"] and f"strategy: {origin} -> fsdp" in run.output


@FULL
def test_a_run_of_eight_devices_goes_on_with_seven_and_three(workspace):
    """Of 8 rows, each of 7 ranks has one, and one of them a second."""
    before = workspace.run("ddp", 8, "batch.micro_batch_size=1")
    for world in (7, 3):
        run = workspace.resume(before, 10, "ddp", world, "batch.micro_batch_size=1")
        assert_same_curve(run, before, start=10)
        assert run.facts["world_size"] == world
