"""Early stopping by evaluations, some of which are not finite."""

from __future__ import annotations

import math

import pytest

from samecurve.checkpoint import resume
from samecurve.config.schema import Checkpoint, Evaluate, Recipe
from samecurve.storage.atomic import json_values
from samecurve.storage.records import mismatch
from samecurve.training.evaluator import EarlyStopping

NAN, INF = math.nan, math.inf


def recipe(patience: int | None, best: str | None = None) -> Recipe:
    return Recipe.model_construct(evaluate=Evaluate(patience=patience), checkpoint=Checkpoint(best=best))


@pytest.mark.parametrize(
    ("best", "values", "state"),
    [
        (None, [3.0, 2.0, 2.5], {"value": 2.0, "step": 2, "evaluations_since": 1}),
        (None, [NAN, 2.0, 2.5], {"value": 2.0, "step": 2, "evaluations_since": 1}),
        (None, [INF, NAN], {"evaluations_since": 2}),
        (None, [2.0, NAN, 1.0], {"value": 1.0, "step": 3, "evaluations_since": 0}),
        ("eval_accuracy", [NAN, 0.1, 0.2], {"value": 0.2, "step": 3, "evaluations_since": 0}),
    ],
)
def test_what_is_not_finite_is_not_better(best, values, state):
    """And what a checkpoint keeps of it can be read again."""
    stopping = EarlyStopping(recipe(None, best), {})
    for step, value in enumerate(values, start=1):
        stopping.evaluated(step, {best or "eval_loss": value})
        kept = json_values(stopping.state)
        assert not mismatch(kept, resume._SCHEMA["stopping?"])
        stopping = EarlyStopping(recipe(None, best), kept)
    assert stopping.state == {"metric": best or "eval_loss", **state}


def test_the_end_of_a_run():
    stopping = EarlyStopping(recipe(2), {})
    assert [stopping.evaluated(step, {"eval_loss": NAN}) for step in (1, 2)] == [
        "",
        "early stopping (evaluate.patience): the last 2 evaluations were not better than eval_loss any finite number",
    ]


def test_a_task_without_the_metric_is_not_counted():
    stopping = EarlyStopping(recipe(1), {})
    assert stopping.evaluated(1, {"eval_mine": 1.0}) == "" and not stopping.is_over and stopping.state == {}
