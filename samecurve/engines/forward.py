"""One micro-batch through a model that Accelerate prepared: to its logits, or to sums over what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from samecurve.losses.chunked_cross_entropy import ChunkedHead, Measure, install_chunked_head, trained_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe
    from samecurve.data.batches import MicroBatch
    from samecurve.interfaces.task import Task


@dataclass
class Forward:
    """head: None where logits are taken all at once. teacher: of a task that learns from one."""

    model: nn.Module
    task: Task
    device: torch.device
    head: ChunkedHead | None = None
    teacher: nn.Module | None = None

    def logits(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """With what the task's functions are called with beside them."""
        batch, targets = self._on_device(batch)
        return self.task.outputs(self.model(**batch.inputs)), targets

    def step(self, batch: MicroBatch, context: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss and the sums of Task.step_loss. context: more targets, of a task whose rows meet."""
        if self.head is not None:
            return self.sums(self.task.loss, batch), torch.zeros(0, device=self.device)
        logits, targets = self.logits(batch)
        return self.task.step_loss(logits, **targets, **context)

    def sums(self, measure: Measure, batch: MicroBatch) -> Tensor:
        """measure: (logits, **targets) -> sums over them."""
        if self.head is None:
            logits, targets = self.logits(batch)
            return measure(logits, **targets)
        positions = trained_positions(batch.labels)
        if positions is not None:
            positions = positions.to(self.device, non_blocking=True)
        batch, targets = self._on_device(batch)
        with self.head.measuring(measure, targets, positions):
            return self.model(**batch.inputs).logits

    def _on_device(self, batch: MicroBatch) -> tuple[MicroBatch, dict[str, Tensor]]:
        batch = batch.to(self.device)
        if self.teacher is None:
            return batch, batch.targets
        with torch.no_grad():
            return batch, batch.targets | {"teacher": self.teacher(**batch.inputs).logits}


def chunked_head(module: PreTrainedModel, skeleton: PreTrainedModel, task: Task, recipe: Recipe) -> ChunkedHead | None:
    """As loss.implementation asks; raises what `install_chunked_head` does. module: without its wrapper.

    Not in fp16, where a gradient that is taken before the loss is scaled is often 0.
    """
    wanted = recipe.loss.implementation
    if wanted == "full" or recipe.precision == "fp16" or not task.by_token:
        return None
    return install_chunked_head(module, skeleton, wanted, recipe.compile != "off")


def evaluation_sums(task: Task, logits: Tensor, **targets: Tensor) -> Tensor:
    """fp64 (1 + n,): the task's loss and statistics of some rows or tokens."""
    loss = task.loss(logits, **targets).double().reshape(1)
    return torch.cat([loss, task.statistics(logits, **targets).double()])
