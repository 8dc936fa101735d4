"""Micro-batches through a model that Accelerate prepared: to losses, sums and features, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from samecurve.distributed import rng_state
from samecurve.engines import grad_cache
from samecurve.interfaces.engine import EvalResult
from samecurve.losses import chunked_cross_entropy
from samecurve.losses.chunked_cross_entropy import TokenSums, trained_positions

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe
    from samecurve.data.batches import MicroBatch
    from samecurve.interfaces.task import Task


@dataclass
class Forward:
    """loss_implementation: see `install_loss`. teacher: of a task that learns from one."""

    accelerator: Accelerator
    model: nn.Module
    task: Task
    loss_implementation: str = "full"
    teacher: nn.Module | None = None

    @property
    def shard(self) -> tuple[int, int]:
        """(data-parallel rank, data-parallel size)."""
        return self.accelerator.process_index, self.accelerator.num_processes

    def loss(self, batch: MicroBatch, context: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss and the sums of Task.step_loss over a micro-batch. context: more targets, see `with_contexts`."""
        if self.loss_implementation != "full":
            return self.sums(self.task.loss, batch), torch.zeros(0, device=self.accelerator.device)
        logits, targets = self.logits(batch)
        return self.task.step_loss(logits, **targets, **context)

    def sums(self, measure: Callable[..., Tensor], batch: MicroBatch) -> Tensor:
        """measure: (logits, **targets) -> sums over them."""
        if self.loss_implementation == "full":
            logits, targets = self.logits(batch)
            return measure(logits, **targets)
        positions = trained_positions(batch.labels)  # on the CPU, where nobody waits for the answer
        if positions is not None:
            positions = positions.to(self.accelerator.device, non_blocking=True)
        batch, targets = self._on_device(batch)
        return self.model(**batch.inputs, sums=TokenSums(measure, targets, positions))

    def logits(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """With what the task's functions are called with beside them."""
        batch, targets = self._on_device(batch)
        return self.task.outputs(self.model(**batch.inputs)), targets

    def _on_device(self, batch: MicroBatch) -> tuple[MicroBatch, dict[str, Tensor]]:
        batch = batch.to(self.accelerator.device)
        if self.teacher is None:
            return batch, batch.targets
        with torch.no_grad():
            return batch, batch.targets | {"teacher": self.teacher(**batch.inputs).logits}

    def with_contexts(
        self, micro_batches: Sequence[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, dict[str, Tensor], bool]]:
        """Each micro-batch, what its rows' losses have to know of the step's other rows, whether it is the last one."""
        contexts: list[dict[str, Tensor]] = [{}] * len(micro_batches)
        if self.task.context is not None:
            with rng_state.rehearsed(self.accelerator.device):
                context = self.task.context(self._features(micro_batches))
            contexts = grad_cache.cut(context, self.shard, len(micro_batches))
        for index, (batch, context) in enumerate(zip(micro_batches, contexts, strict=True), start=1):
            yield batch, context, index == len(micro_batches)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """See Engine.evaluate."""
        if self.task.context is not None:
            return EvalResult(math.nan, self.count(micro_batches), features=self.features(micro_batches))
        self.model.eval()
        with torch.no_grad():
            sums = sum(map(partial(self.sums, partial(evaluation_sums, self.task)), micro_batches))
        self.model.train()
        tokens = self.count(micro_batches)
        loss, *statistics = self.total(sums)
        return EvalResult(loss=loss / max(tokens, 1), tokens=tokens, statistics=tuple(statistics))

    def features(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """See Engine.features."""
        self.model.eval()
        found = self._features(micro_batches)
        self.model.train()
        return found.cpu()

    def _features(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """Of all ranks' rows."""
        return self.accelerator.gather(grad_cache.features(self.task, self.logits, micro_batches))

    def count(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Over how many tokens (or what else the task counts) all ranks' losses are sums."""
        tokens = torch.tensor(sum(self.task.count(**batch.targets) for batch in micro_batches), dtype=torch.float64)
        return int(self.total(tokens))

    def total(self, values: Tensor) -> float | list[float]:
        """The sum over the ranks, in fp64: a number for a scalar, a list for what is 1-D."""
        if not values.numel():
            return []
        on_device = values.to(self.accelerator.device, torch.float64)
        return self.accelerator.reduce(on_device, reduction="sum").tolist()


def install_loss(model: PreTrainedModel, skeleton: PreTrainedModel, task: Task, recipe: Recipe) -> str:
    """Prepare `model` for loss.implementation, before a strategy wraps it: full, chunked or liger.

    Not in fp16, where a gradient that is taken before the loss is scaled is often 0. Raises what
    chunked_cross_entropy.install_chunked_head does.
    """
    wanted = recipe.loss.implementation
    if wanted == "full" or recipe.precision == "fp16" or not task.by_token:
        return "full"
    return chunked_cross_entropy.install_chunked_head(model, skeleton, wanted, recipe.compile != "off") or "full"


def evaluation_sums(task: Task, logits: Tensor, **targets: Tensor) -> Tensor:
    """fp64 (1 + n,): the task's loss and statistics of some rows or tokens."""
    loss = task.loss(logits, **targets).double().reshape(1)
    return torch.cat([loss, task.statistics(logits, **targets).double()])
