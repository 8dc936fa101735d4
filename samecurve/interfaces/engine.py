"""What the training loop may ask of an engine: whole optimizer steps, and verbs that all ranks call together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from samecurve.data.batches import MicroBatch
    from samecurve.interfaces.memory import Held
    from samecurve.interfaces.sharded_state import State


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same values on every rank.

    loss: mean over the step's trained tokens (or what else the task counts) of all ranks and micro-batches, in nats.
    grad_norm: global L2 norm of that loss's gradient before clipping.
    tokens: how many those were, all ranks.
    applied: False when nothing was updated (no trained token, an fp16 overflow, or a refusal).
    refused: why the step must not be applied (its loss or its gradient is not finite), "" otherwise. No weight, moment
    or counter was touched, and the next step starts clean.
    statistics: the sums over all rows of what the task asked for (Task.step_loss); () where nothing was trained.
    """

    loss: float
    grad_norm: float
    tokens: int
    applied: bool
    refused: str = ""
    statistics: tuple[float, ...] = ()


@dataclass(frozen=True)
class EvalResult:
    """loss: mean over all evaluation rows, each counted once; nan where rows' losses depend on one another, and
    `features` are found instead. tokens: over how many, all ranks.

    statistics: the sums over all rows of what the task asked for (Task.statistics). features: as Engine.features.
    """

    loss: float
    tokens: int
    statistics: tuple[float, ...] = ()
    features: Tensor | None = None


def finished(
    loss: float, grad_norm: float, tokens: int, applied: bool, may_rescale: bool, statistics: tuple[float, ...] = ()
) -> StepResult:
    """The result of a step that trained something; the same rule everywhere for what is refused.

    may_rescale: a gradient that is not finite may only be out of fp16's range, which a smaller loss scale cures.
    """
    refused = ""
    if not math.isfinite(loss):
        refused = f"the loss is {loss}"
    elif not applied and not may_rescale:
        refused = f"the gradient norm is {grad_norm} at a loss of {loss:.6g}"
    return StepResult(loss, grad_norm, tokens, applied, refused, statistics)


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """As run.json has it: float32, not torch.float32."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


class Engine(Protocol):
    @property
    def shard(self) -> tuple[int, int]:
        """(data-parallel rank, data-parallel size): which rows of the global batch this process reads."""

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """Forward, backward and update over this rank's micro-batches."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Loss without an update. Every rank passes the same number of micro-batches."""

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Task.features without dropout: all ranks' rows, (rows, n), fp32 on the CPU, the same on every rank.

        Every rank passes the same number of micro-batches; its rows stand together, rank 0's first. Those of an
        EvaluationBatches come in their order, and last what only fills it up. Only one micro-batch is held at a time.
        """

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        """What is exported: weights by Hugging Face name, one at a time, full fp32 CPU tensors on rank 0, else None."""

    def held_bytes(self) -> Held:
        """What this rank holds between two steps. Not collective."""

    def describe(self) -> dict:
        """What really runs, asked of the live objects."""

    shapes: dict[str, torch.Size]
    """Full shape by Hugging Face name of every parameter that is trained."""
    device: torch.device
    state: State
    """This rank's part of weights and optimizer: what a checkpoint reads and writes."""
    loss_scale_state: dict
    """fp16's dynamic loss scale, {} without one. Assigning it goes on from there."""
