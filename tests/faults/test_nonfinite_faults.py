"""Losses, gradients, inputs and weights that are not numbers: the same steps are skipped under every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from battery import SINGLE, Battery, Case, Record, write_result
from harness import STEPS, Run, largest_relative_difference, long

SCRIPT = str(Path(__file__).with_name("poisoned_train.py"))
STRATEGIES = ("fsdp", "zero2", "zero3", "zero2_offload", "pipeline")
# what the first stage of a pipeline embeds, the last one's loss; gradients and losses are broken where they are made
PLACES = [("loss", 1), ("gradient", 1), ("input", 0)]


def poisoned(battery: Battery, case: Case, poison: str, *more: str) -> Run:
    started = battery.victim(case).start("", "", *more, script=SCRIPT, SAMECURVE_POISON=poison)
    ended = started.wait()
    run = Run(started.directory, started.process.returncode, started.output)
    code = run.status["exit_code"]
    record = Record(case.strategy or "single", case.world, case.launcher, "numbers", poison, code, hung=not ended)
    record.left_behind, record.seconds = started.left, round(started.seconds, 1)
    write_result(record)
    assert ended and not started.left, run.output
    return run


def skipped(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.directory / "skipped.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(battery) -> Run:
    """A single process that skips steps 7 and 8."""
    run = poisoned(battery, SINGLE, "loss@7-8:*")
    assert run.returncode == 0, run.output
    golden = battery.golden(SINGLE)
    assert run.column("loss")[:6] == golden.column("loss")[:6] and run.column("loss")[8:] != golden.column("loss")[8:]
    return run


@pytest.mark.parametrize(
    ("strategy", "kind", "rank"),
    [  # every day distributed/test_nonfinite.py has them one step at a time
        *long(("zero1", "loss", 0), *((strategy, *place) for strategy in STRATEGIES for place in PLACES)),
        *long(*((strategy, kind, rank) for strategy in ("ddp", "zero1") for kind, rank in (*PLACES, ("input", 1)))),
    ],
)
def test_the_same_steps_are_skipped_and_the_curve_is_the_same(strategy, kind, rank, battery, expected):
    run = poisoned(battery, Case(strategy), f"{kind}@7-8:{rank}")
    assert run.returncode == 0, run.output
    assert run.metrics[-1]["skipped_steps"] == 2
    assert [(line["step"], line["rows"]) for line in skipped(run)] == [
        (line["step"], line["rows"]) for line in skipped(expected)
    ]
    assert [line["step"] for line in skipped(run)] == [7, 8] and all(len(line["rows"]) == 8 for line in skipped(run))
    assert run.column("learning_rate") == expected.column("learning_rate")
    good = [step for step in range(STEPS) if step not in (6, 7)]
    losses, others = run.column("loss"), expected.column("loss")
    assert largest_relative_difference([losses[i] for i in good], [others[i] for i in good]) < 1e-5
    if kind != "gradient":
        assert losses[6] is None and losses[7] is None


@pytest.mark.parametrize(
    ("case", "poison"),
    [(SINGLE, "input@4-25:*"), *long(*((Case(name), "weight@4-4:1") for name in ("ddp", "zero1", *STRATEGIES)))],
    ids=str,
)
def test_too_many_in_a_row_end_the_run_with_code_5(case, poison, battery):
    # a checkpoint with such a weight is refused, which would be the end first
    run = poisoned(battery, case, poison, "checkpoint.every_steps=25")
    assert run.status["state"] == "failed" and run.status["exit_code"] == 5, run.output
    assert run.output.count("NumericError (exit code 5)") == 1
    assert "skipped steps in a row, and numerics.max_skipped_steps is 3" in run.output
    first = skipped(run)[0]["step"]
    # a weight that only the optimizer holds shows after the next update
    assert first in (4, 5) and [line["step"] for line in skipped(run)] == list(range(first, first + 4))


@pytest.mark.parametrize("case", [SINGLE, *long(Case(), *(Case(name) for name in ("zero1", *STRATEGIES)))], ids=str)
def test_a_checkpoint_never_holds_a_weight_that_is_not_finite(case, battery):
    # behind the last step's update: no loss has shown it
    run = poisoned(battery, case, "updated_weight@10-10:*", "steps=10")
    assert run.status["state"] == "failed" and run.status["exit_code"] == 5, run.output
    assert run.output.count("NumericError (exit code 5)") == 1
    assert "holds values that are not finite" in run.status["reason"]
    assert [folder.name for folder in (run.directory / "checkpoints").glob("step_*")] == [run.checkpoint(5).name]


def test_a_loss_spike_goes_back_to_the_checkpoint(battery):
    run = poisoned(battery, SINGLE, "spike@13-13:*", "numerics.rollback_ratio=3")
    assert run.returncode == 0, run.output
    checkpoint = run.checkpoint(10)
    assert run.output.count(f"back to the weights of {checkpoint}") == 1
    (line,) = skipped(run)
    assert line["step"] == 13 and "times the smoothed one" in line["reason"] and len(line["rows"]) == 8
    golden = battery.golden(SINGLE).column("loss")
    assert run.column("loss")[:12] == golden[:12]
    assert run.column("loss")[13] == pytest.approx(golden[13], rel=0.1)  # three updates less, the same rows


# ZeRO gathers the weights that are computed with anew in every update, so a difference in them heals by itself
@pytest.mark.parametrize("case", [Case(), *long(Case("ddp", 4))], ids=str)
def test_replicas_that_differ_are_named(case, battery):
    run = poisoned(battery, case, "flip@4-4:1", "numerics.compare_replicas_every_steps=5")
    assert run.status["exit_code"] == 5, run.output
    assert run.output.count("NumericError (exit code 5)") == 1
    assert "rank 1: " in run.status["reason"] and "step 5: replicated weights" in run.status["reason"]
    if case.world > 2:  # of two, nobody can say which one is wrong
        assert "rank 0: " not in run.status["reason"]
