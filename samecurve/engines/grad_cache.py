"""Gradient caching for tasks with a cross-batch loss (Task.features, Task.context)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from samecurve.data.batches import MicroBatch
    from samecurve.interfaces.task import Task

Forward = Callable[["MicroBatch"], tuple[Tensor, dict[str, Tensor]]]


@torch.no_grad()
def features(task: Task, forward: Forward, micro_batches: Iterable[MicroBatch]) -> Tensor:
    """Compute the features of this rank's rows: (rows, n), fp32. `forward` returns a batch's (logits, targets)."""
    assert task.features is not None  # only tasks with features come here
    found = []
    for batch in micro_batches:
        logits, targets = forward(batch)
        found.append(task.features(logits, **targets).float())
    return torch.cat(found)


def cut(context: dict[str, Tensor], shard: tuple[int, int], num_micro_batches: int) -> list[dict[str, Tensor]]:
    """Split the context of all rows of a step into one for each micro-batch of this rank (`shard`: rank, size)."""
    rank, size = shard
    parts = {name: value.chunk(size)[rank].chunk(num_micro_batches) for name, value in context.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
