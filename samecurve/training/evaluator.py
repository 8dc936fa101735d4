"""Evaluation on the validation rows, during and after training, and early stopping by its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from samecurve.data.batches import EvaluationBatches
from samecurve.data.datasets.base import Rows
from samecurve.interfaces.engine import EvalResult
from samecurve.specs.tasks import BETTER

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.interfaces.engine import Evaluator
    from samecurve.interfaces.task import Task


class Evaluation:
    """Evaluation of all validation rows. Each source of a mixture is evaluated separately for a loss per source."""

    def __init__(
        self, rows: Rows, micro_batch_size: int, shard: tuple[int, int], alive: Callable[[], None] = lambda: None
    ):
        """See EvaluationBatches for the arguments."""
        self._sources = {
            source: EvaluationBatches(part, micro_batch_size, shard, alive)
            for source, part in enumerate(rows.parts)
            if len(part)
        }
        self._mixed = len(rows.parts) > 1

    @property
    def num_micro_batches(self) -> int:
        return sum(map(len, self._sources.values()))

    def metrics(self, engine: Evaluator, task: Task) -> dict[str, float]:
        """Compute the task's metrics over all rows, each counted once; for a mixture also eval_loss_source_N.

        Collective.

        Raises:
            DataError: the evaluated tokens, rows or pairs are not as many as the data have.
        """
        results = {source: engine.evaluate(batches) for source, batches in self._sources.items()}
        if not self._mixed:
            return task.metrics(results[0])
        losses = {f"eval_loss_source_{source}": result.loss for source, result in results.items()}
        tokens = sum(result.tokens for result in results.values())
        loss = sum(result.loss * result.tokens for result in results.values()) / max(tokens, 1)
        statistics = zip(*(result.statistics for result in results.values()), strict=True)
        return task.metrics(EvalResult(loss, tokens, tuple(map(sum, statistics)))) | losses


def due(step: int, every_steps: int, last_step: int) -> bool:
    """Whether an evaluation is due after `step`, 1-based; also after the last step unless every_steps is 0."""
    return every_steps > 0 and (step % every_steps == 0 or step == last_step)


class EarlyStopping:
    """Counts the evaluations since the best value of checkpoint.best, or of eval_loss without one.

    Attributes:
        state: saved in each checkpoint, so that a resumed run goes on counting: the metric, its best finite value, the
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

        A value that is not finite is not better than any. A task of one's own may not have the metric.

        Returns:
            The line to print if it ends the run, "" otherwise.
        """
        value, best = metrics.get(self._metric), self.state.get("value")
        if value is None:
            return ""
        gain = value - (value if best is None else best)
        gain = -gain if BETTER[self._metric] == "lower" else gain
        if math.isfinite(value) and (best is None or gain > self._recipe.evaluate.min_improvement):
            self.state |= {"metric": self._metric, "value": value, "step": step, "evaluations_since": 0}
        else:
            self.state |= {"metric": self._metric, "evaluations_since": self.state.get("evaluations_since", 0) + 1}
        return self.describe() if self.is_over else ""

    def describe(self) -> str:
        """Say why the run is over."""
        count, value = self.state["evaluations_since"], self.state.get("value")
        best = "any finite number" if value is None else f"{value:.6g} at step {self.state['step']}"
        times = "evaluation was" if count == 1 else f"{count} evaluations were"
        return f"early stopping (evaluate.patience): the last {times} not better than {self._metric} {best}"
