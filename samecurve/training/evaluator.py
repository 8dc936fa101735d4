"""Evaluation on the validation rows, during and after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from samecurve.data.batches import EvaluationBatches
from samecurve.data.datasets.base import Rows
from samecurve.interfaces.engine import EvalResult

if TYPE_CHECKING:
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
