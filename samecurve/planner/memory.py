"""Memory anatomy: every line of a rank's bytes at three moments of a step. The peak is the largest moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from samecurve.planner.activations import LAST_NORM, checkpoint_bytes, layer_bytes
from samecurve.planner.hardware import GIB
from samecurve.planner.job import Job
from samecurve.planner.profiles import BY_COST, GATHERED, Profile, profile
from samecurve.planner.stages import Stage, in_flight, stages
from samecurve.specs import loss_chunks

CONTEXT_GIB = 0.9  # CUDA context with torch's kernels on recent versions
NCCL_GIB = 1.2  # channels and buffers of a job with several communicators
FRAGMENTATION = 0.08  # of what is allocated; torch_reserved over torch_allocated
# The same of a process's resident memory: the C library keeps some of what tensors give back. One layer of width 512 on
# 16,384 tokens (AMD EPYC, torch 2.13.0, 2026-11-24): 0.51 GiB of tensors, and 0.63 to 0.73 GiB more than without.
RESIDENT_GAPS = 0.3
BLOCK_ROUNDING = 1.01  # the allocator rounds blocks up
WORKSPACE_GIB = 0.1  # of cuBLAS, up to 32 MiB for each stream (torch's CUBLAS_WORKSPACE_CONFIG)
AHEAD_SHARE = 0.8  # of a GPU's memory, up to which the host runs ahead
MOMENTS = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Line:
    """One line of the anatomy: bytes at each of MOMENTS, the formula in words and its source."""

    name: str
    forward: float
    backward: float
    optimizer: float
    formula: str
    source: str = ""


@dataclass(frozen=True)
class Anatomy:
    """Memory of one class of ranks."""

    stage: Stage
    lines: tuple[Line, ...]
    reserved_gib: float | None = None
    gpus: int = 1
    gaps: float = FRAGMENTATION

    def total(self, moment: str) -> float:
        return sum(getattr(line, moment) for line in self.lines)

    @property
    def moment(self) -> str:
        return max(MOMENTS, key=self.total)

    @property
    def peak(self) -> float:
        """Allocated tensor bytes at the largest moment."""
        return self.total(self.moment)

    @property
    def binding(self) -> str:
        """Name of the largest line at the peak."""
        return max(self.lines, key=lambda line: getattr(line, self.moment)).name


def anatomy(job: Job, constants: Profile | None = None) -> list[Anatomy]:
    """Compute the memory of each class of ranks. nanotron's counter is the first stage's (README of the runs)."""
    constants = constants or profile(job.stack)
    learnt = job.calibration
    reserved = learnt.process(job.library) if learnt else None
    resident = job.memory_kind == "resident"
    gaps = RESIDENT_GAPS if resident else FRAGMENTATION
    held = 0 if resident else WORKSPACE_GIB * GIB
    workspaces = Line("workspaces", held, held, held, "cuBLAS, some streams", "fitted")
    kept = job.reserved_gib if reserved is None else reserved
    found = []
    for stage in stages(job, job.stack in BY_COST):
        lines = [*_states(job, stage), *_activations(job, stage, constants), *_gathered(job, stage), workspaces]
        # last, because it fills what the other lines leave free
        lines.append(_gathered_inputs(job, constants, lines))
        factor = learnt.memory_factor(job.library) if learnt else 1
        if factor != 1:  # what runs on these machines measured is more, or less, than the other lines
            end, middle, update = ((factor - 1) * sum(getattr(line, moment) for line in lines) for moment in MOMENTS)
            lines.append(Line("measured slack", end, middle, update, f"{factor:.3f} x the lines above", "calibration"))
        found.append(Anatomy(stage, tuple(lines), kept, job.layout.gpus, gaps))
    return found


def stage_parameters(job: Job, stage: Stage) -> tuple[float, float]:
    """Return (parameters of a rank without experts, expert parameters) before sharding over data-parallel ranks."""
    shape, layout = job.shape, job.layout
    dense = stage.layers * shape.dense_layer_parameters
    dense += shape.embedding_parameters if stage.embedding else 0
    # a tied head that is on another stage than the embedding is a copy
    needs_head = stage.head and (not shape.tied or not stage.embedding)
    dense += shape.head_parameters if needs_head else 0
    dense += shape.hidden if stage.head else 0  # the last norm
    return dense / layout.tp, stage.layers * shape.expert_layer_parameters / (layout.ep * job.mlp_split)


def shard_sizes(job: Job) -> tuple[float, float]:
    """Return the ranks that share one copy of dense states, and of expert states."""
    whole = max(job.layout.shard, 1)
    return whole, max(whole / job.layout.ep, 1)


def _states(job: Job, stage: Stage) -> list[Line]:
    parameters, zero, sizes = stage_parameters(job, stage), job.layout.zero, job.states
    ranks = shard_sizes(job)

    def held(bytes_each: float, sharded_from: int) -> float:
        shares = ranks if zero >= sharded_from else (1, 1)
        return bytes_each * sum(count / share for count, share in zip(parameters, shares, strict=True))

    # FSDP's gradients that wait for the step's last micro-batch are whole
    waits = job.sharding.reduces_once and zero == 3 and job.grad_accum > 1
    weights, gradients = held(sizes.weights, 3), held(sizes.gradients, 4 if waits else 2)
    accumulators, optimizer = held(sizes.accumulators, 2), held(sizes.optimizer, 1)
    if any(part.startswith("optimizer:") for part in job.offload):
        gradients = accumulators = 0.0  # they follow the optimizer as soon as they are reduced
    master = held(sizes.master, 1)
    # 0: without accumulation, gradients are None from the update to the backward pass
    persistent = 1 if job.grad_accum > 1 or zero or sizes.master else 0
    upcast = 4 * master / max(sizes.master, 1) * min(sizes.master, 4) / 4 if job.stack == "deepspeed" and zero else 0
    buckets, filled = job.sharding.bucket_bytes, min(job.sharding.bucket_bytes, 4 * sum(parameters))
    if job.memory_kind == "resident":  # pages of a buffer that no gradient reaches never become resident
        buckets = filled
    # ZeRO-3 allocates its bucket before the first step, and its reduce-scatter copies what is in it, ordered by rank
    kept, copied = (buckets, filled) if zero == 3 else (0, 0)
    table = "ZeRO, arXiv:1910.02054, section 3"
    return [
        Line("weights", weights, weights, weights, f"{sizes.weights:g} B per parameter", table),
        Line("gradients", gradients * persistent, gradients, gradients, f"{sizes.gradients:g} B per parameter", table),
        Line("accumulators", accumulators, accumulators, accumulators, "fp32 sums of the micro-batches' gradients"),
        Line("master weights", master, master, master, f"{sizes.master:g} B per parameter of the shard", table),
        Line("optimizer", optimizer, optimizer, optimizer, f"{sizes.optimizer:g} B per parameter of the shard", table),
        Line("reduce buckets", kept, buckets, kept, "reduce_bucket_size elements, twice if overlapped", "DeepSpeed"),
        Line("reordered bucket", 0, copied, 0, "the bucket's gradients by rank", "reduce_scatter_coalesced"),
        Line("gradient copy", 0, 0, upcast, "the shard's gradients in the master weights' precision", "DeepSpeed"),
    ]


def _activations(job: Job, stage: Stage, constants: Profile) -> list[Line]:
    tokens, hidden = job.tokens, job.shape.hidden
    whole = layer_bytes(job)
    full = job.checkpointing == "full"
    kept = checkpoint_bytes(job) if full else whole
    count = in_flight(job, stage)
    activations = kept * stage.layers * count
    working = whole if full else 0
    boundary = 2 * tokens * hidden * count if stage.embedding else 0
    lines = [
        Line(
            "activations",
            activations,
            activations,
            0,
            "kept bytes per layer x layers x micro-batches",
            "activations.py",
        ),
        Line("recomputed layer", 0, working, 0, "one layer's activations", "arXiv:2205.05198"),
        Line("embedding output", boundary, boundary, 0, "2 s b h per micro-batch"),
        *_own_lines(job, stage),
    ]
    return [*lines, *_loss_lines(job, constants)] if stage.head else lines


def _loss_lines(job: Job, constants: Profile) -> list[Line]:
    columns = job.shape.vocab / job.layout.tp
    if not (job.flow and job.chunked_loss):
        logits = job.tokens * columns * constants.logits_bytes / (8 if job.chunked_loss else 1)
        return [Line("logits and loss", logits, 0, 0, f"{constants.logits_bytes:g} B per logit", "fitted")]
    source = "losses/chunked_cross_entropy.py"
    is_cpu = job.card.generation == "cpu"
    tokens = loss_chunks.on_cpu(columns) if is_cpu else loss_chunks.on_gpu(columns, job.memory_gib * GIB)
    chunk = 4 * 4 * columns * min(job.tokens, tokens)
    whole = columns * job.shape.hidden
    # a chunk's logits are gone when their product with the hidden states is added to the gradient
    chunk = max(chunk, job.element_bytes * whole)
    return [
        Line("logits of a chunk", chunk, 0, 0, "four fp32 tensors, or their part of the head's gradient", source),
        Line("gradient of the head", 4 * whole, 0, 0, "V h in fp32, until the backward pass", source),
    ]


def _own_lines(job: Job, stage: Stage) -> list[Line]:
    """Return what transformers' models hold beside the layers' activations under this project's engines."""
    if not job.flow:
        return []
    if job.flow == "copies" and job.checkpointing == "full":
        stage = replace(stage, layers=1)  # a recomputed layer casts its weights again
    copies = 2 * sum(stage_parameters(job, stage)) if job.flow in ("copies", "autocast") else 0
    last = LAST_NORM * job.tokens * job.shape.hidden if stage.head else 0
    return [
        Line("16-bit weights", copies, copies, 0, "2 B per parameter, until the backward pass", "bf16_copies.py"),
        Line("last norm", 0, last, 0, f"{LAST_NORM} s b h with gradients of the layers' inputs", "activations.py"),
    ]


def _gathered_inputs(job: Job, constants: Profile, lines: Sequence[Line]) -> Line:
    """Inputs of products that are whole along the sequence, where sequence parallelism divides what is kept.

    DTensor keeps those of both blocks of a layer for the backward pass, 4 s b h, and Megatron has one buffer for all.
    Elsewhere, the host launches gathers ahead of the GPU: inputs and outputs of some layers' blocks, at most 8 s b h of
    each layer. Where memory is short, torch's allocator waits until their work is done, and frees them.
    """
    layout, name = job.layout, "gathered inputs"
    unit, layers = job.tokens * job.shape.hidden, job.shape.layers / layout.pp
    if layout.tp == 1 or not layout.sequence_parallel:
        return Line(name, 0, 0, 0, "")
    if GATHERED.get(job.stack) == "kept":
        whole = 4 * (layers if job.checkpointing == "none" else 1) * unit
        return Line(name, whole, whole, 0, "4 s b h per layer", "torch.distributed.tensor")
    if GATHERED.get(job.stack) == "one buffer":
        return Line(name, 2 * unit, 2 * unit, 0, "2 s b h", "Megatron's global memory buffer")
    ahead = min(constants.gathered_inputs, 8 * layers) * unit if layout.pp == 1 else 0
    free = AHEAD_SHARE * job.memory_gib * GIB
    forward, backward = (
        max(0, min(ahead, free - sum(getattr(line, moment) for line in lines))) for moment in MOMENTS[:2]
    )
    return Line(name, forward, backward, 0, f"{ahead / unit:.0f} s b h launched ahead of the GPU, while memory is free")


def _gathered(job: Job, stage: Stage) -> list[Line]:
    """Whole weights of the layer in use and of the prefetched one, and their unreduced gradients."""
    layout, shape = job.layout, job.shape
    if layout.zero < 3:
        return []
    unit = shape.dense_layer_parameters / layout.tp + shape.expert_layer_parameters / (layout.ep * job.mlp_split)
    root = (shape.embedding_parameters + (0 if shape.tied else shape.head_parameters)) / layout.tp
    elements = 2 * unit + root
    formula, source = "two layers, embedding and head", "torch's MemTracker under fully_shard"
    if not job.sharding.reshards:
        elements, formula = sum(stage_parameters(job, stage)), "all of the rank's layers"
    elif job.stack == "deepspeed":  # weights that are needed again soon stay until the backward pass
        elements = max(elements, min(job.live_elements + job.sharding.prefetched, shape.parameters / layout.tp))
        formula, source = "within stage3_max_reuse_distance, and prefetched", "DeepSpeed"
    units = job.gather_bytes * elements
    second = job.states.weights * job.shape.parameters / layout.secondary if layout.secondary > 1 else 0
    reduced = job.states.gradients * unit
    return [
        Line(
            "gathered weights",
            units,
            units,
            0,
            formula,
            source,
        ),
        Line("secondary weights", second, second, 0, f"a copy over {layout.secondary} ranks", "arXiv:2306.10209, hpZ"),
        Line("reduce buffer", 0, reduced, 0, "one layer's gradients before the reduce-scatter"),
    ]


def overhead(each: Anatomy) -> list[Line]:
    """List what a GPU holds beside tensors: the allocator's rounding and gaps, the CUDA context and NCCL's buffers."""
    share = BLOCK_ROUNDING * (1 + each.gaps) - 1
    end, middle, update = (each.total(moment) * share for moment in MOMENTS)
    fragmentation = Line("fragmentation", end, middle, update, f"{share:.0%} of the tensors", "assumed")
    if each.reserved_gib is not None:
        reserved = each.reserved_gib * GIB
        return [fragmentation, Line("reserved", reserved, reserved, reserved, "context and libraries (reserved_gib)")]
    context, nccl = CONTEXT_GIB * GIB, NCCL_GIB * GIB if each.gpus > 1 else 0
    return [
        fragmentation,
        Line("context", context, context, context, "CUDA context with torch's kernels", "assumed"),
        Line("NCCL", nccl, nccl, nccl, "buffers of several communicators", "assumed"),
    ]


def counted(each: Anatomy, memory_kind: str) -> float:
    """Return the peak in bytes that a counter shows: torch_allocated, torch_active, torch_reserved or nvidia_smi."""
    if memory_kind in ("", "torch_allocated", "torch_active"):
        return each.peak * BLOCK_ROUNDING
    lines = overhead(each)[:1] if memory_kind == "torch_reserved" else overhead(each)
    return each.peak + sum(getattr(line, each.moment) for line in lines)
