"""Early stopping: a run ends once evaluate.patience evaluations in a row were not better than the best one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samecurve.specs.tasks import BETTER

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe


class EarlyStopping:
    """Counts the evaluations since the best value of checkpoint.best, or of eval_loss without one.

    Attributes:
        state: saved in each checkpoint, so that a resumed run goes on counting: the metric, its best value, the
            step of that, and the number of evaluations since. {} before the first evaluation.
        is_over: whether the run has to end.
    """

    def __init__(self, recipe: Recipe, state: dict):
        self._recipe = recipe
        self._metric = recipe.checkpoint.best or "eval_loss"
        self.state = dict(state) if state.get("metric") == self._metric else {}

    @property
    def is_over(self) -> bool:
        patience = self._recipe.evaluate.patience
        return patience is not None and self.state.get("evaluations_since", 0) >= patience

    def evaluated(self, step: int, metrics: dict[str, float]) -> str:
        """Count an evaluation, also without a patience, which a later session may have.

        Returns:
            The line to print if it ends the run, "" otherwise.
        """
        value = metrics[self._metric]
        if not self.state or self._is_better(value, self.state["value"]):
            self.state |= {"metric": self._metric, "value": value, "step": step, "evaluations_since": 0}
        else:
            self.state["evaluations_since"] += 1
        return self.describe() if self.is_over else ""

    def describe(self) -> str:
        """Say why the run is over."""
        count, best = self.state["evaluations_since"], f"{self.state['value']:.6g} at step {self.state['step']}"
        times = "evaluation was" if count == 1 else f"{count} evaluations were"
        return f"early stopping (evaluate.patience): the last {times} not better than {self._metric} {best}"

    def _is_better(self, value: float, best: float) -> bool:
        least = self._recipe.evaluate.min_improvement
        gain = best - value if BETTER[self._metric] == "lower" else value - best
        return gain > least  # False for nan, too
