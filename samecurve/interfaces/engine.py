"""The interface between the training loop and an engine.

An engine runs whole optimizer steps. Its methods are collective unless their docstring says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from samecurve.errors import DataError
from samecurve.strategy.parallel_dims import DIMENSIONS, ParallelDims

if TYPE_CHECKING:
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.sharded_state import SavedState, State


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, with the same values on every rank.

    Attributes:
        loss: mean over the step's trained tokens (or other units, see Task.count) of all ranks and micro-batches, in
            nats.
        grad_norm: global L2 norm of that loss's gradient before clipping.
        tokens: number of trained tokens in the step, over all ranks.
        applied: False when nothing was updated (no trained token, an fp16 overflow, or a refused step).
        refused: reason why the step must not be applied (its loss or gradient is not finite), "" otherwise. A refused
            step changes no weight, moment or counter and leaves no gradient to the next step.
        statistics: sums over all rows of the statistics that Task.step_loss returns; () if nothing was trained.
        router: the routers' values of metrics.jsonl; {} without a router loss, which is not part of `loss`.
    """

    loss: float
    grad_norm: float
    tokens: int
    applied: bool
    refused: str = ""
    statistics: tuple[float, ...] = ()
    router: Mapping[str, float | list[float]] = field(default_factory=dict)

    @classmethod
    def of_nothing(cls) -> StepResult:
        """Build the result of a step without any trained token."""
        return cls(loss=0.0, grad_norm=0.0, tokens=0, applied=False)


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """Configuration reported by the live engine.

    `verify` compares the description with the requested configuration; run.json records it.

    Attributes:
        engine: class name of the engine.
        optimizer: class name of the optimizer.
        device: torch's name of the device, e.g. cuda:1.
        dims: sizes of the parallel dimensions, by the process groups and the weights.
        order: dimensions as the ranks are numbered, outermost first: neighbouring ranks differ in the last one. Those
            of one rank do not count.
        placements: number of this rank's weights by their placement on a mesh, e.g. "fsdp Shard(0), tp Replicate";
            "whole" for a weight without a mesh. {} under DeepSpeed.
        num_parameters_per_rank: number of parameters that this rank holds between two steps.
        precision: dtype of the forward pass: fp32, bf16 or fp16.
        gradient_clipping: maximum gradient norm.
        weight_dtype: dtype of the weights.
        reduce_dtype: dtype in which gradients are reduced across ranks; None if unused or unknown.
        accumulation_dtype: dtype in which gradients are accumulated; None if unused or unknown.
        sharded: whether each rank holds only a shard of each weight.
        zero_stage: DeepSpeed's ZeRO stage, 0 without ZeRO.
        secondary_partition: number of ranks over which ZeRO-3 shards a second copy of the weights; 1 without one.
        context_parallel: how the ranks of dims.cp see each other's keys: ulysses, allgather, ring, or "".
        tp_sequence_parallel: whether the ranks of dims.tp compute norms and residuals for a part of the tokens each.
        offload: offloaded parts with their device, e.g. optimizer:cpu.
        loss_implementation: full, chunked or liger.
        kernels: layers that were replaced by faster kernels.
        whole_gradient_bytes: bytes of unreduced gradients that FSDP2 accumulates on each rank.
        num_teacher_parameters_per_rank: number of the teacher's parameters that this rank holds.
        layers_per_stage: number of layers of each pipeline stage; None without a pipeline.
        activation_checkpoint_interval: number of layers recomputed together in a pipeline; None without a pipeline.
    """

    engine: str
    optimizer: str
    world_size: int
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
    dims: ParallelDims
    order: Sequence[str] = DIMENSIONS
    placements: Mapping[str, int] = field(default_factory=dict)
    zero_stage: int = 0
    secondary_partition: int = 1
    context_parallel: str = ""
    tp_sequence_parallel: bool = False
    offload: tuple[str, ...] = ()
    loss_implementation: str = "full"
    kernels: tuple[str, ...] = ()
    whole_gradient_bytes: int = 0
    num_teacher_parameters_per_rank: int = 0
    accumulation_dtype: str | None = None
    layers_per_stage: tuple[int, ...] | None = None
    activation_checkpoint_interval: int | None = None

    @property
    def mesh(self) -> dict[str, int]:
        """The dimensions with more than one rank, outermost first."""
        sizes = self.dims.sizes
        return {name: sizes[name] for name in self.order if sizes[name] > 1}

    def to_json(self) -> dict[str, Any]:
        """Return the description as run.json has it, in which every size has a name of its own."""
        described, dims = asdict(self), self.dims
        del described["dims"], described["order"]
        return described | {
            "mesh": self.mesh,
            "data_parallel_size": dims.dp,
            "pipeline_stages": dims.pp,
            # of a sharded model (HSDP)
            "replicate_size": dims.dp_replicate if self.sharded and dims.pp == 1 else 1,
            "tensor_parallel_size": dims.tp,
            "context_parallel_size": dims.cp,
            "expert_parallel_size": dims.ep,
        }


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation.

    Attributes:
        loss: mean over all evaluation rows, each counted once, over all ranks; nan for a cross-batch loss, whose
            result holds `features` instead.
        tokens: number of tokens (or other units, see Task.count) in that mean, over all ranks.
        statistics: sums over all rows of Task.statistics.
        features: as Engine.features; None unless the task has a cross-batch loss.
    """

    loss: float
    tokens: int
    statistics: tuple[float, ...] = ()
    features: Tensor | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # exp(710) overflows a float

    def check(self, expected: int, units: str) -> None:
        """Raise DataError unless as many rows, pairs or tokens were evaluated as the validation data have."""
        if self.tokens != expected:
            raise DataError(f"{self.tokens} validation {units} were evaluated, but the data have {expected}")


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as in run.json and a model's config.json: float32 instead of torch.float32."""
    return str(dtype).removeprefix("torch.")


class Evaluator(Protocol):
    """A model that can be evaluated, with or without a strategy."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Compute the loss without an update. Every rank passes the same number of micro-batches."""
        ...


class Saved(Protocol):
    """What checkpoints read and write: weights and optimizer state under one strategy.

    Attributes:
        shapes: full shape of every parameter that is saved, by name; of an Engine the trained ones.
        device: the device that this rank computes on.
    """

    @property
    def state(self) -> SavedState:
        """This rank's shards of weights and optimizer state."""
        ...

    @property
    def shard(self) -> tuple[int, int]:
        """(data-parallel rank, data-parallel size), which select this process's rows of the global batch."""
        ...

    @property
    def loss_scale_state(self) -> dict:
        """fp16's dynamic loss scale, {} without one. Assigning a saved value restores the scale."""
        ...

    @loss_scale_state.setter
    def loss_scale_state(self, values: dict) -> None: ...

    shapes: dict[str, torch.Size]
    device: torch.device


class Engine(Evaluator, Saved, Protocol):
    """A model with its optimizer under one strategy. Names of `shapes` are those of Hugging Face."""

    @property
    def state(self) -> State: ...

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """Run forward, backward and one update over this rank's micro-batches."""
        ...

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Compute Task.features without dropout, gathered over all ranks.

        Every rank passes the same number of micro-batches. Only one micro-batch is in memory at a time.

        Returns:
            (rows, n), fp32 on the CPU, the same on every rank. A rank's rows are contiguous, rank 0's first. For
            EvaluationBatches the rows are in dataset order, followed by the padding rows.
        """
        ...

    def outputs(self, batch: MicroBatch, positions: Tensor | None = None) -> Tensor | None:
        """Compute the model's outputs (Task.outputs) for one micro-batch, without dropout.

        Every rank passes the same micro-batch.

        Args:
            positions: (rows,) of which token of each row to return the outputs; None for all.

        Returns:
            (rows, ...), fp32 on the CPU, on rank 0; None on other ranks.
        """
        ...

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the weights to export, one at a time: Hugging Face name, full fp32 CPU tensor on rank 0, else None."""
        ...

    def memory_usage(self) -> MemoryUsage:
        """Measure the memory that this rank holds between two steps. Not collective."""
        ...

    def describe(self) -> EngineDescription:
        """Report the live configuration. Not collective."""
        ...


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes that this rank holds on device and host together; NVMe is not counted.

    Attributes:
        weights: parameters and buffers.
        optimizer: moments, and fp32 master weights where they are separate from the working weights.
        gradients: estimated bytes of gradients during a step (most strategies free them between steps). They have the
            weights' dtype, or fp32 under DeepSpeed, and are whole on every rank unless the strategy shards them.
        gradients_between_steps: part of `gradients` that stays allocated between steps.
    """

    weights: int
    optimizer: int
    gradients: int
    gradients_between_steps: int = 0
