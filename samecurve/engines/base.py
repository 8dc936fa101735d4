"""What the training loop may ask of an engine: whole optimizer steps, and verbs that all ranks call together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import NumericError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..data import MicroBatch


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same values on every rank.

    loss: token mean over the step's trained tokens of all ranks and micro-batches, in nats.
    grad_norm: global L2 norm of that loss's gradient before clipping.
    tokens: trained tokens of this step, all ranks.
    applied: False when nothing was updated (no trained token, or an fp16 overflow).
    """

    loss: float
    grad_norm: float
    tokens: int
    applied: bool


@dataclass(frozen=True)
class EvalResult:
    """loss: token mean over all evaluation rows, each counted once. tokens: how many were trained on, all ranks."""

    loss: float
    tokens: int


def refusal(loss: float, grad_norm: float) -> NumericError:
    """The error of a step that was not applied because its loss or its gradient is not finite; the same everywhere."""
    what = f"the gradient norm is {grad_norm} at a loss of {loss:.6g}" if math.isfinite(loss) else f"the loss is {loss}"
    return NumericError(f"{what}; the step was not applied and the weights were not touched")


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """As run.json has it: float32, not torch.float32."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


class Engine(Protocol):
    @property
    def shard(self) -> tuple[int, int]:
        """(data-parallel rank, data-parallel size): which rows of the global batch this process reads."""

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """Forward, backward and update over this rank's micro-batches. NumericError leaves the weights untouched."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Loss without an update. Every rank passes the same number of micro-batches."""

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        """What is exported: weights by Hugging Face name, one at a time, full fp32 CPU tensors on rank 0, else None."""

    def describe(self) -> dict:
        """What really runs, asked of the live objects."""

    def save(self, directory: Path) -> None:
        """Write a checkpoint. Not implemented yet."""

    def load(self, directory: Path) -> None:
        """Read a checkpoint. Not implemented yet."""
