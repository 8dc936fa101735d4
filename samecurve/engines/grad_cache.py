"""Gradient caching for tasks with a cross-batch loss (Task.features, Task.context)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.task import Task

Forward = Callable[["MicroBatch"], tuple[Tensor, dict[str, Tensor]]]


@torch.no_grad()
def features(task: Task, forward: Forward, micro_batches: Iterable[MicroBatch], padded_rows: int = 0) -> Tensor:
    """Compute the features of this rank's rows.

    Args:
        task: the task.
        forward: returns a micro-batch's (logits, targets).
        micro_batches: of this rank.
        padded_rows: pad each micro-batch's features with zeros to this many rows, so that all ranks have as many.

    Returns:
        (rows, n), fp32.
    """
    assert task.features is not None  # only tasks with features come here
    features_of_batches = []
    for batch in micro_batches:
        logits, targets = forward(batch)
        rows = task.features(logits, **targets).float()
        features_of_batches.append(functional.pad(rows, (0, 0, 0, max(padded_rows - len(rows), 0))))
    return torch.cat(features_of_batches)


def contexts(
    task: Task, features: Tensor, rows: Sequence[Sequence[int]], rank: int, padded: bool = False
) -> list[dict[str, Tensor]]:
    """Compute Task.context of a step, one for each micro-batch of a rank. Rows that train nothing get zeros.

    Args:
        task: the task.
        features: of all ranks' micro-batches, each padded to the largest one's rows: (ranks * micro-batches * rows, n).
        rows: Batch.micro_batches.
        rank: the data-parallel rank.
        padded: give every micro-batch as many rows as the largest one has, as pipelines pad their inputs.
    """
    assert task.context is not None  # only tasks with a cross-batch loss come here
    most, count = padded_rows(rows), len(rows[0])
    real = [nth * most + row for nth, size in enumerate(chain(*rows)) for row in range(size)]
    places = torch.tensor(real).to(features.device, non_blocking=True)  # a list as an index would wait for the device
    by_batch: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, value in task.context(features[places]).items():
        whole = value.new_zeros(len(features), *value.shape[1:])
        whole[places] = value
        for context, part, size in zip(by_batch, whole.chunk(len(rows))[rank].chunk(count), rows[rank], strict=True):
            context[name] = part if padded else part[: max(size, 1)]  # a micro-batch without rows reads a padding row
    return by_batch


def padded_rows(rows: Sequence[Sequence[int]]) -> int:
    """Return the rows of the largest micro-batch. rows: Batch.micro_batches."""
    return max(chain(*rows))
