"""What is to be planned: a model, its batch, its numbers' sizes and the machines."""

from __future__ import annotations

from dataclasses import dataclass, field

from samecurve.planner.calibration import Calibration
from samecurve.planner.cluster import Host
from samecurve.planner.hardware import Gpu
from samecurve.planner.layout import Layout
from samecurve.planner.links import Level
from samecurve.planner.shape import ModelShape


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter before sharding: weights, gradients, separate fp32 accumulators, fp32 copy, Adam's states."""

    weights: float = 2
    gradients: float = 2
    accumulators: float = 0
    master: float = 4
    optimizer: float = 8

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.accumulators + self.master + self.optimizer


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        grad_accum: forwards per step; with a pipeline, the micro-batches in it.
        node_gbit: nominal Gbit/s of a node's network cards together; 0 if unknown.
        checkpointing: none, selective (attention's scores only) or full.
        stack: the software that runs the job, a key of profiles.json or any other word.
        memory_kind: the counter whose peak is predicted; "" means torch_allocated.
        levels: links of a cluster file; empty: the GPU's own and the network cards.
        reserved_gib: for context, NCCL and other processes; None: estimated.
        offload: what is kept outside of the GPU, such as "optimizer:cpu" or "param:nvme".
        host: where it is kept.
        bucket_bytes: buffers in which DeepSpeed reduces gradients, of their whole size from the first gradient on, and
            under ZeRO-3 from the start.
        reduces_once: whether FSDP reduces gradients once per step instead of after every micro-batch.
        calibration: corrections learnt from runs on these machines.
        flow: what carries transformers' activations under this project's engines: "16-bit" weights, 16-bit "copies" of
            fp32 ones, "autocast" of fp32 ones, or "fp32"; "" for other software.
        packed_experts: whether a layer's experts are one tensor and one product, or take turns.
    """

    shape: ModelShape
    layout: Layout
    card: Gpu
    micro_batch: int
    seq: int
    grad_accum: int = 1
    states: StateBytes = field(default_factory=StateBytes)
    gpu_kind: str = ""
    gpu_memory_gib: float = 0
    gpus_per_node: int = 8
    node_gbit: float = 0
    precision: str = "bf16"
    fp8_recipe: str = ""
    flash: bool = True
    compile: bool = False
    async_tp: bool = False
    chunked_loss: bool = False
    checkpointing: str = "none"
    stack: str = ""
    memory_kind: str = ""
    levels: tuple[Level, ...] = ()
    reserved_gib: float | None = None
    offload: tuple[str, ...] = ()
    host: Host = field(default_factory=Host)
    bucket_bytes: float = 0
    reduces_once: bool = False
    calibration: Calibration | None = None
    flow: str = ""
    packed_experts: bool = True

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.seq / self.layout.cp

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of activations, and of weights as they are gathered."""
        return 4 if self.precision == "fp32" else 2

    @property
    def mlp_split(self) -> int:
        """Tensor-parallel ranks that share an MLP. samecurve leaves experts whole that it spreads over ranks."""
        return 1 if self.stack == "fsdp2" and self.layout.ep > 1 else self.layout.tp

    @property
    def memory_gib(self) -> float:
        return self.gpu_memory_gib or self.card.memory_gib
