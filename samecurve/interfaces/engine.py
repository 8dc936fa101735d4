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

    @classmethod
    def of_nothing(cls) -> StepResult:
        """No row of the step trains a token."""
        return cls(loss=0.0, grad_norm=0.0, tokens=0, applied=False)

    @classmethod
    def of(
        cls,
        loss: float,
        grad_norm: float,
        tokens: int,
        applied: bool,
        may_rescale: bool,
        statistics: tuple[float, ...] = (),
    ) -> StepResult:
        """The result of a step that trained something; the same rule everywhere for what is refused.

        may_rescale: a gradient that is not finite may only be out of fp16's range, which a smaller loss scale cures.
        """
        refused = ""
        if not math.isfinite(loss):
            refused = f"the loss is {loss}"
        elif not applied and not may_rescale:
            refused = f"the gradient norm is {grad_norm} at a loss of {loss:.6g}"
        return cls(loss, grad_norm, tokens, applied, refused, statistics)


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """What really runs, asked of the live objects; `verify` compares it with what was asked for, run.json holds it.

    Attributes:
        engine, optimizer: class names.
        device: as torch has it, e.g. cuda:1.
        num_parameters_per_rank: how many this rank holds between two steps.
        precision: what the forward pass computes in: fp32, bf16 or fp16.
        gradient_clipping: the largest gradient norm.
        weight_dtype, reduce_dtype, accumulation_dtype: of weights, of gradients on their way between ranks, and of sums
            of gradients; None: there is none, or it is not known.
        sharded: whether a rank holds only a part of each weight. replicate_size: over how many ranks that is repeated.
        offload: parts and where they are, e.g. optimizer:cpu.
        loss_implementation: full, chunked or liger. kernels: layers that were replaced by faster ones.
        whole_gradient_bytes: of gradients that FSDP2 has not reduced yet, on each rank.
        layers_per_stage, activation_checkpoint_interval: of a pipeline.
    """

    engine: str
    optimizer: str
    world_size: int
    data_parallel_size: int
    device: str
    num_parameters: int
    num_trained_parameters: int
    num_parameters_per_rank: int
    precision: str
    micro_batch_size: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    weight_dtype: str
    reduce_dtype: str | None
    sharded: bool
    zero_stage: int = 0
    replicate_size: int = 1
    pipeline_stages: int = 1
    offload: tuple[str, ...] = ()
    loss_implementation: str = "full"
    kernels: tuple[str, ...] = ()
    whole_gradient_bytes: int = 0
    num_teacher_parameters_per_rank: int = 0
    accumulation_dtype: str | None = None
    layers_per_stage: tuple[int, ...] | None = None
    activation_checkpoint_interval: int | None = None


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

    def describe(self) -> EngineDescription:
        """What really runs. Not collective."""

    shapes: dict[str, torch.Size]
    """Full shape by Hugging Face name of every parameter that is trained."""
    device: torch.device
    state: State
    """This rank's part of weights and optimizer: what a checkpoint reads and writes."""
    loss_scale_state: dict
    """fp16's dynamic loss scale, {} without one. Assigning it goes on from there."""
