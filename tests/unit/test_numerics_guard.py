from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from samecurve.config.schema import Numerics as Settings
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import DataError, NumericError
from samecurve.interfaces.engine import StepResult
from samecurve.run.run_directory import RunDirectory
from samecurve.training.numerics_guard import MOST_ROLLBACKS, Guard


class Batches:
    def rows_of(self, step: int) -> np.ndarray:
        return np.array([3, 1, step])


ROWS = Batches()


def guard(tmp_path, **settings) -> Guard:
    return Guard(Settings(**settings), RunDirectory(tmp_path), ControlGroup())


def result(loss: float = 2.0, refused: str = "") -> StepResult:
    return StepResult(loss, 1.0, 8, applied=not refused, refused=refused)


def test_refused_steps_are_written_down_and_the_one_too_many_ends_the_run(tmp_path):
    one = guard(tmp_path, max_skipped_steps=2)
    bad = result(math.nan, "the loss is nan")
    for step in (1, 2):
        one.check(step, bad, ROWS)
    one.check(3, result(), ROWS)  # a good one starts the count anew
    for step in (4, 5):
        one.check(step, bad, ROWS)
    with pytest.raises(
        NumericError, match="step 6: the loss is nan; .*That is 3 skipped steps in a row.*skipped.jsonl"
    ):
        one.check(6, bad, ROWS)
    written = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [record["step"] for record in written] == [1, 2, 4, 5, 6]
    assert written[0] == {"step": 1, "reason": "the loss is nan", "loss": "nan", "grad_norm": "1.0", "rows": [3, 1, 0]}


def test_weights_that_no_step_has_shown_to_be_good_are_pending(tmp_path):
    """A checkpoint of them could be resumed with fewer steps, and be exported as if nothing had happened."""
    one, found = guard(tmp_path), []
    for step, each in enumerate((result(), result(math.nan, "the loss is nan"), EMPTY, result()), 1):
        one.check(step, each, ROWS)
        found.append(one.is_pending)
    assert found == [False, True, True, False]


NAN = result(math.nan, "the loss is nan")
OVERFLOW = StepResult(2.0, math.inf, 8, applied=False)
EMPTY = StepResult(0.0, 0.0, 0, applied=False)


def end(tmp_path, *results: StepResult, updates: int | None = None) -> None:
    """A run of these steps. updates: those of earlier sessions, too."""
    one = guard(tmp_path)
    for step, each in enumerate(results, 1):
        one.check(step, each, ROWS)
    applied = sum(each.applied for each in results)
    one.check_last(len(results), applied if updates is None else updates)


@pytest.mark.parametrize("last", [(NAN,), (NAN, NAN), (NAN, EMPTY), (NAN, OVERFLOW)])
def test_a_run_does_not_end_well_after_steps_that_were_refused(last, tmp_path):
    with pytest.raises(
        NumericError, match=r"no step after step 1 was applied, .*optimizer.learning_rate.*skipped.jsonl"
    ):
        end(tmp_path, result(), *last)


def test_only_an_update_shows_that_the_weights_are_good(tmp_path):
    """Weights that are not numbers refuse every step that has tokens."""
    with pytest.raises(NumericError, match="That is 4 skipped steps in a row"):
        end(tmp_path, result(), NAN, EMPTY, NAN, EMPTY, NAN, EMPTY, NAN, result())


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ((OVERFLOW,) * 3, NumericError, "none of 3 steps was applied: .* fp16's range"),
        ((EMPTY, OVERFLOW), NumericError, "none of 2 steps"),
        ((EMPTY, EMPTY), DataError, "none of the rows of 2 steps has a trained token"),
    ],
)
def test_a_run_that_trained_nothing_does_not_end_well(steps, error, message, tmp_path):
    with pytest.raises(error, match=message):
        end(tmp_path, *steps)


@pytest.mark.parametrize(
    "steps",
    [
        (OVERFLOW, OVERFLOW, OVERFLOW, OVERFLOW, result()),  # fp16 looks for its scale
        (result(), OVERFLOW),
        (result(), EMPTY),
        (NAN, NAN, result()),
    ],
)
def test_steps_that_are_skipped_as_a_matter_of_course_end_well(steps, tmp_path):
    end(tmp_path, *steps)


def test_updates_of_an_earlier_session_count(tmp_path):
    end(tmp_path, EMPTY, updates=5)


def test_a_spike_by_hand(tmp_path):
    one = guard(tmp_path, rollback_ratio=2.0)
    assert not one.spiked(1, result(100.0), None, ROWS)
    assert not one.spiked(2, result(4.0), 2.0, ROWS)
    assert one.spiked(3, result(4.1), 2.0, ROWS)
    assert "2.05 times" in (tmp_path / "skipped.jsonl").read_text()


def test_spikes_that_do_not_end_do(tmp_path):
    one = guard(tmp_path, rollback_ratio=2.0)
    assert all(one.spiked(step, result(9.0), 2.0, ROWS) for step in range(MOST_ROLLBACKS))
    with pytest.raises(NumericError, match="after 3 roll-backs"):
        one.spiked(9, result(9.0), 2.0, ROWS)


def test_off_by_default(tmp_path):
    assert not guard(tmp_path).spiked(1, result(1e9), 1.0, ROWS)


class Ranks:
    """Three ranks, of which the last holds another value."""

    def conclude(self, own, conclusion):
        return conclusion([own, own, {**own, "b": "0"}])


class OneRank:
    def __init__(self):
        self.state = self

    def replicas(self):
        yield "a", torch.ones(3)
        yield "b", torch.zeros(2)


def test_the_rank_that_differs_is_named(tmp_path):
    one = Guard(Settings(compare_replicas_every_steps=2), RunDirectory(tmp_path), Ranks())
    assert not one.compare_replicas(1, OneRank())
    with pytest.raises(NumericError, match="rank 2: 1 differ, first b") as error:
        one.compare_replicas(2, OneRank())
    assert "rank 0" not in str(error.value)


def test_a_comparison_that_took_time_is_said(tmp_path):
    """It is no step's."""
    one = Guard(Settings(compare_replicas_every_steps=2), RunDirectory(tmp_path), Alike())
    assert [one.compare_replicas(step, OneRank()) for step in (1, 2, 3, 4)] == [False, True, False, True]


class Alike:
    def conclude(self, own, conclusion):
        return conclusion([own, own])
