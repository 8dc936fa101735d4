"""A job to plan: a model, its batch and strategy, its numbers' sizes and the machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from samecurve.planner import links
from samecurve.planner.calibration import Calibration
from samecurve.planner.cluster import Host
from samecurve.planner.hardware import ATTENTION_ALONE, Gpu, Profile
from samecurve.planner.links import Level, Link
from samecurve.planner.model_shape import Frozen, ModelShape
from samecurve.strategy.parallel_dims import BATCH, FSDP, ParallelDims
from samecurve.strategy.plan import Strategy


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter before sharding: weights, gradients, separate fp32 accumulators, fp32 copy, Adam's states.

    `average`: a momentum encoder's, which is where the optimizer's states are.
    """

    weights: float = 2
    gradients: float = 2
    accumulators: float = 0
    master: float = 4
    optimizer: float = 8
    average: float = 0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.accumulators + self.master + self.optimizer + self.average


@dataclass(frozen=True)
class Sharding:
    """A strategy's settings for weights and gradients on their way between ranks, beside the sizes.

    Attributes:
        gather_bytes: per element of a weight that is gathered, under ZeRO-3 and FSDP; 0: as activations.
        reduce_bytes: per element of a gradient that is reduced, under ZeRO-3 and FSDP; 0: as activations.
        reduces_once: whether FSDP reduces gradients once per step instead of after every micro-batch.
        gathers_once: whether weights are gathered once per step, and stay until its last backward pass.
        reshards: whether FSDP frees a layer's weights after its forward pass.
        overlaps: whether collectives may run beside the backward pass.
        bucket_bytes: buffers in which DeepSpeed reduces gradients, of their whole size from the first gradient on, and
            under ZeRO-3 from the start.
        persistent: elements up to which each rank keeps a whole weight under DeepSpeed's ZeRO-3.
        reuse_distance: elements of other weights, used before a gathered one is used again, from which on DeepSpeed
            frees it (`stage3_max_reuse_distance`).
        prefetched: elements that DeepSpeed gathers ahead (`stage3_prefetch_bucket_size`).
        weight_buffers: elements in host memory through which a rank reads weights from a disk (`offload_param`).
        state_buffers: buffers for optimizer states on a disk (`offload_optimizer`), one subgroup each.
        subgroup: elements of the largest part of a rank's weights that is updated at once (`sub_group_size`).
    """

    gather_bytes: float = 0
    reduce_bytes: float = 0
    reduces_once: bool = False
    gathers_once: bool = False
    reshards: bool = True
    overlaps: bool = True
    bucket_bytes: float = 0
    persistent: float = 100_000
    reuse_distance: float = 1e9
    prefetched: float = 50_000_000
    weight_buffers: float = 5e8
    state_buffers: int = 4
    subgroup: float = 1e9


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        strategy: the parallel sizes, what is sharded, and the schedule: beside those of our own strategies (where
            "deepspeed" is a 1F1B) gpipe, 1f1b, interleaved, zb-1p and zb-2p of published runs.
        grad_accum: forwards per step; with a pipeline, the micro-batches in it.
        node_gbit: nominal Gbit/s of a node's network cards together; 0 if unknown.
        checkpointing: none, selective (see `keeps_products`) or full.
        stack: the software that runs the job, a key of profiles.json or any other word.
        memory_kind: the counter whose peak is predicted; "" means torch_allocated.
        levels: links of a cluster file; empty: the GPU's own and the network cards.
        reserved_gib: for context, NCCL and other processes; None: estimated.
        host: where offloaded states are kept.
        sharding: how weights and gradients travel.
        calibration: corrections learnt from runs on these machines.
        flow: what carries transformers' activations under this project's engines: "16-bit" weights, 16-bit "copies" of
            fp32 ones, "autocast" of fp32 ones, or "fp32"; "" for other software.
        packed_experts: whether a layer's experts are one tensor and one product, or take turns.
        virtual_stages: pipeline stages of a rank.
        frozen: of a model with an adapter; `states` are then means over all of its weights.
        teacher: the frozen model that a distillation also computes.
        masked: whether attention gets a mask of a row's documents, which SDPA converts and keeps in each layer.
        sequences: of a row, such as two of a pair of answers.
    """

    shape: ModelShape
    strategy: Strategy
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
    host: Host = field(default_factory=Host)
    sharding: Sharding = field(default_factory=Sharding)
    calibration: Calibration | None = None
    flow: str = ""
    packed_experts: bool = True
    masked: bool = False
    virtual_stages: int = 1
    frozen: Frozen | None = None
    teacher: ModelShape | None = None
    sequences: int = 1

    @property
    def trained(self) -> float:
        """Trained elements by elements of the model."""
        return self.frozen.trained if self.frozen else 1

    @property
    def trains_head(self) -> bool:
        """Whether the output head's weight has a gradient."""
        return not self.frozen or self.frozen.trains_head

    @property
    def offloads(self) -> bool:
        """Whether a GPU's states are elsewhere; on a CPU they are its processes', which the anatomy counts."""
        return bool(self.strategy.offload) and self.card.generation != "cpu"

    @property
    def assumes_host(self) -> bool:
        """Whether the memory of the host that states are offloaded to is not known."""
        return self.offloads and self.host.is_assumed

    @property
    def dims(self) -> ParallelDims:
        return self.strategy.dims

    @property
    def zero(self) -> int:
        """What is sharded over `shard` ranks: 1 optimizer, 2 gradients too, 3 weights too (FSDP's)."""
        return 3 if self.strategy.sharding == "fsdp" else self.strategy.zero_stage

    @property
    def shard(self) -> int:
        """Ranks that share one copy of what is sharded."""
        return self.dims.size(*FSDP) if self.zero else 1

    @property
    def exchange(self) -> str:
        """How ranks see the keys of a row's other parts: ulysses, allgather or ring; "" where rows are whole."""
        return (self.strategy.context_parallel or "ring") if self.dims.cp > 1 else ""

    @property
    def library(self) -> str:
        """Name the software whose overheads a job's runs share.

        DeepSpeed's pipeline is not its ZeRO: it has an engine of its own, without hooks on every gradient.
        """
        if self.stack != "deepspeed":
            return "torch"
        return "deepspeed" if self.dims.pp == 1 else "deepspeed pipeline"

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.sequences * self.seq / self.dims.cp

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of activations, and of weights as they are gathered."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gather_bytes(self) -> float:
        """Bytes of an element of a weight that ZeRO-3 or FSDP gathers; FSDP2 casts its fp32 shards before it does."""
        stored = self.states.weights or self.element_bytes  # 0: the weights are elsewhere
        return self.sharding.gather_bytes or min(stored, self.element_bytes)

    @property
    def reduce_bytes(self) -> float:
        """Bytes of gradients that ZeRO-3 or FSDP reduces, per element of the model."""
        return (self.sharding.reduce_bytes or self.element_bytes) * self.trained

    @property
    def updates_on_host(self) -> bool:
        """Whether the optimizer's states and update are on the host."""
        return any(target.startswith("optimizer:") for target in self.strategy.offload)

    @property
    def keeps_products(self) -> bool:
        """Whether selective recomputation is by operator: it keeps what products return, elsewhere every second's.

        Megatron's, and any without a fused kernel, repeats attention alone.
        """
        elsewhere = self.flash and self.stack not in ATTENTION_ALONE
        return self.checkpointing == "selective" and (bool(self.flow) or elsewhere)

    @property
    def repeats_layers(self) -> bool:
        """Whether the backward pass runs a layer's forward pass once more, with its exchanges.

        This project's selective recomputation keeps results of products, not what ranks have exchanged of them.
        """
        return self.checkpointing == "full" or (self.keeps_products and bool(self.flow))

    @property
    def live_elements(self) -> float:
        """Elements of a rank's weights that DeepSpeed's ZeRO-3 does not gather again for the backward pass.

        Between the two uses of a weight lie those that come later in the model, forward and backward, and in full
        recomputation once more. A model that is gathered ahead as a whole stays.
        """
        elements = self.shape.parameters / self.dims.tp
        if elements <= self.sharding.prefetched:
            return elements
        passes = 3 if self.repeats_layers else 2
        return min(elements, self.sharding.reuse_distance / passes)

    @property
    def mlp_split(self) -> int:
        """Tensor-parallel ranks that share an MLP. samecurve leaves experts whole that it spreads over ranks."""
        return 1 if self.stack == "fsdp2" and self.dims.ep > 1 else self.dims.tp

    @property
    def sequence_split(self) -> int:
        """Tensor-parallel ranks that share the tokens of norms and residuals, with sequence parallelism."""
        return self.dims.tp if self.strategy.tp_sequence_parallel else 1

    @property
    def memory_gib(self) -> float:
        return self.gpu_memory_gib or self.card.memory_gib


def stride(dims: ParallelDims, axis: str) -> int:
    """Return the distance of neighbouring ranks of one group of an axis; dp is that of its outer sizes."""
    inner = {"tp": (), "cp": ("tp",), "dp": ("cp", "tp"), "pp": (*BATCH, "cp", "tp")}
    return dims.size(*inner[axis])


def axis_link(job: Job, axis: str, constants: Profile, ranks: int = 0) -> Link:
    """Find the link of the groups of tp, cp, dp or pp, or of `ranks` neighbours along it (0: all of the axis)."""
    return group_link(job, ranks or getattr(job.dims, axis), stride(job.dims, axis), constants)


def group_link(job: Job, ranks: int, stride: int, constants: Profile) -> Link:
    """Find the link of a group of ranks that are `stride` apart, over the job's machines."""
    levels = job.levels or links.levels_of(job.card, job.gpus_per_node, job.node_gbit or links.DEFAULT_NODE_GBIT)
    step = constants.ring_step_us * 1e-6
    return links.link(levels, job.gpus_per_node, ranks, stride, constants.network_share, step)


def to_json(job: Job) -> dict[str, Any]:
    """Return the job without what was learnt from other runs, and without the contents of the strategy's files."""
    strategy = replace(job.strategy, path=None, accelerate={}, deepspeed_path=None, deepspeed=None, nvme_paths=())
    return {name: value for name, value in asdict(replace(job, strategy=strategy)).items() if name != "calibration"}


def from_json(content: Mapping[str, Any]) -> Job:
    """Read a job again. Raises ValueError for one that this version does not know."""
    problems = [f"{name}: unknown" for name in content.keys() - {field.name for field in fields(Job)}]
    try:
        job = TypeAdapter(Job).validate_python(content)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()]
    if problems:
        raise ValueError("; ".join(problems))
    return job
