"""Bytes of each kind of tensor on a rank, for the memory's table (memory.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from samecurve.planner.activations import (
    LAST_NORM,
    PRODUCT_INPUTS,
    cut_gradient_bytes,
    kept_bytes,
    layer_bytes,
    mask_elements,
    score_gradient_bytes,
)
from samecurve.planner.hardware import GATHERED, Profile
from samecurve.planner.job import Job
from samecurve.planner.stages import Stage, in_flight, shard_sizes, stage_parameters
from samecurve.specs import loss_chunks
from samecurve.specs.gpus import GIB
from samecurve.strategy.timetables import SCHEDULES, order

# Bytes per logit of a loss from whole logits: their logarithms of probabilities, and two gradients, all fp32 (torch's
# profiler, 2.13.0).
FULL_LOSS = 12
AHEAD_SHARE = 0.8  # of a GPU's memory, up to which the host runs ahead (assumed)
MOMENTS = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Line:
    """One line of the anatomy: bytes at each of MOMENTS, the formula in words and its source."""

    name: str
    forward: float
    backward: float
    optimizer: float
    formula: str
    source: str


def states(job: Job, stage: Stage, activations: float) -> list[Line]:
    """Return the lines of weights, gradients and optimizer. activations: the layers' bytes after the forward pass."""
    parameters, zero, sizes = stage_parameters(job, stage), job.zero, job.states
    ranks = shard_sizes(job)

    def held(bytes_each: float, sharded_from: int) -> float:
        shares = ranks if zero >= sharded_from else (1, 1)
        return bytes_each * sum(count / share for count, share in zip(parameters, shares, strict=True))

    # FSDP's gradients that wait for the step's last micro-batch are whole
    waits = job.sharding.reduces_once and zero == 3 and job.grad_accum > 1
    weights, gradients = held(sizes.weights, 3), held(sizes.gradients, 4 if waits else 2)
    accumulators, optimizer = held(sizes.accumulators, 2), held(sizes.optimizer, 1)
    average = 0 if job.strategy.offloads_optimizer else held(sizes.average, 1)
    if job.updates_on_host:
        gradients = accumulators = 0.0  # they follow the optimizer as soon as they are reduced
    master = held(sizes.master, 1)
    # gradients of the first micro-batches come as activations go, unless DeepSpeed or DDP keep their memory
    is_first = in_flight(job, stage)[0] >= job.grad_accum
    if job.flow and is_first and (is_scheduled(job) or job.stack == "fsdp2"):
        persist, arrive = 0, max(0.0, gradients - activations)
    else:
        persist, arrive = gradients if job.grad_accum > 1 or zero or sizes.master else 0, gradients
    reduced = gradients and held(sizes.gradients, 2)
    upcast = master * min(1, 4 / max(sizes.master, 1)) if job.stack == "deepspeed" and zero else 0
    trained, scales = job.trained * sum(parameters), job.frozen.scale_bytes / job.dims.pp if job.frozen else 0
    buckets, filled = job.sharding.bucket_bytes, min(job.sharding.bucket_bytes, 4 * trained)
    if job.memory_kind == "resident":  # pages of a buffer that no gradient reaches never become resident
        buckets = filled
    # ZeRO-3 allocates its bucket before the first step, and its reduce-scatter copies what is in it, ordered by rank
    kept, copied = (buckets, filled) if zero == 3 else (0, 0)
    if job.flow and job.memory_kind != "resident":  # the activations of the layers whose gradients fill it are gone
        copied = max(0.0, copied - activations * filled / (4 * trained))
    table = "ZeRO, arXiv:1910.02054, section 3"
    return [
        Line("weights", weights, weights, weights, f"{sizes.weights:g} B per parameter", table),
        Line("quantization scales", scales, scales, scales, "whole on every rank", "models/quantized.py"),
        Line("gradients", persist, arrive, reduced, f"{sizes.gradients:g} B per parameter", table),
        Line("accumulators", accumulators, accumulators, accumulators, "fp32 sums of micro-batches' gradients", table),
        Line("master weights", master, master, master, f"{sizes.master:g} B per parameter of the shard", table),
        Line("optimizer", optimizer, optimizer, optimizer, f"{sizes.optimizer:g} B per parameter of the shard", table),
        Line("momentum encoder", average, average, average, "4 B per parameter of the shard", "momentum_encoder.py"),
        Line("reduce buckets", kept, buckets, kept, "reduce_bucket_size elements, twice if overlapped", "DeepSpeed"),
        Line("reordered bucket", 0, copied, 0, "the bucket's gradients by rank", "reduce_scatter_coalesced"),
        Line("gradient copy", 0, 0, upcast, "the shard's gradients in the master weights' precision", "DeepSpeed"),
    ]


def activations(job: Job, stage: Stage) -> list[Line]:
    """Return the lines of what the forward pass keeps, the layers' first, without the loss."""
    tokens, hidden = job.tokens, job.shape.hidden
    whole = layer_bytes(job)
    recomputed = job.checkpointing == "full" or job.keeps_products
    cut, dequantized = cut_gradient_bytes(job), job.element_bytes * (job.frozen.dequantized if job.frozen else 0)
    count, cut_count = in_flight(job, stage, cut / kept_bytes(job))
    cut *= stage.layers * cut_count
    activations = kept_bytes(job) * stage.layers * count
    # of what a layer without recomputation keeps, that which it has not kept
    working = whole - (kept_bytes(job) if job.keeps_products else 0) if recomputed else 0
    scores = score_gradient_bytes(job)
    mask = mask_elements(job) * count if recomputed else 0  # an input of each layer, and else gone before the loss
    boundary = 2 * tokens * hidden * count if stage.embedding else 0
    held = arrived = gradients = 0.0
    pipelining = "torch.distributed.pipelining"
    output = Line("embedding output", boundary, boundary, 0, "2 s b h per micro-batch", "transformers")
    if is_scheduled(job):
        sent = outputs(job, stage) * count
        output = Line("stage output", sent, sent, 0, "4 s b h per micro-batch", pipelining)
        held, arrived, gradients = kept_until_next_step(job, stage)
    last_norm = casts = casts_left = 0.0
    if job.flow:  # what transformers' models hold beside the layers' activations under this project's engines
        last_norm = LAST_NORM * tokens * hidden if stage.head else 0
        casts, casts_left = cast_weights(job, stage, count)
    formula = "kept bytes per layer x layers x micro-batches"
    return [
        Line("activations", activations, activations, 0, formula, "activations.py"),
        Line("between halves", 0, cut, 0, "gradients of products' and norms' outputs", pipelining),
        Line("recomputed layer", 0, working, 0, "one layer's activations", "arXiv:2205.05198"),
        Line("dequantized weight", 0, dequantized, 0, "the largest one, for its product", "models/quantized.py"),
        Line("gradients of scores", 0, scores, 0, "of one layer, 6 B per query and key, 4 in fp32", "transformers"),
        Line("attention mask", mask, mask, 0, "1 B per query and key, before SDPA converts it", "transformers"),
        output,
        Line("16-bit weights", casts, casts_left, 0, "2 B per parameter, until the backward pass", "bf16_copies.py"),
        Line("last norm", 0, last_norm, 0, f"{LAST_NORM} s b h with gradients of the layers' inputs", "activations.py"),
        Line("received", held, held, held, "4 s b h per neighbour and micro-batch", pipelining),
        Line("gradients of inputs", 0, arrived, gradients, "4 s b h per micro-batch after I", pipelining),
    ]


def teacher(job: Job) -> list[Line]:
    """Return the lines of a distillation's teacher, which FSDP and ZeRO-3 divide, and a pipeline's ranks."""
    if job.teacher is None:
        return []
    shape, width = job.teacher, job.element_bytes
    ranks = (job.shard if job.zero == 3 else 1) * job.dims.pp
    weights, logits = width * shape.parameters / ranks, width * job.tokens * shape.vocab
    return [
        Line("teacher", weights, weights, weights, f"{width} B per parameter, frozen", "engines/teacher.py"),
        Line("teacher's logits", logits, 0, 0, "of a micro-batch, until its loss", "engines/teacher.py"),
    ]


def loss_lines(job: Job, constants: Profile) -> list[Line]:
    """Return the lines of logits and loss. All schedules but GPipe follow each loss with its backward pass at once."""
    columns = job.shape.vocab / (1 if job.flow and not job.chunked_loss else job.dims.tp)
    count = job.grad_accum if job.strategy.schedule == "GPipe" and job.dims.pp > 1 else 1
    if not (job.flow and job.chunked_loss):
        bytes_per_logit, source = (
            (FULL_LOSS, "losses/cross_entropy.py") if job.flow else (constants.logits_bytes, "fitted")
        )
        logits = job.tokens * columns * bytes_per_logit / (8 if job.chunked_loss else 1)
        return [
            Line("logits and loss", count * logits, (count - 1) * logits, 0, f"{bytes_per_logit:g} B per logit", source)
        ]
    source = "losses/chunked_cross_entropy.py"
    is_cpu = job.card.generation == "cpu"
    tokens = loss_chunks.on_cpu(columns) if is_cpu else loss_chunks.on_gpu(columns, job.memory_gib * GIB)
    chunk = 4 * 4 * columns * min(job.tokens, tokens)
    whole = columns * job.shape.hidden if job.trains_head else 0
    # a chunk's logits are gone when their product with the hidden states is added to the gradient, and all are when the
    # backward pass multiplies the gradient by its factor and casts it
    chunk = max(chunk, (4 + job.element_bytes) * whole)
    formula = "V h in fp32 per micro-batch, until its backward pass"
    return [
        Line("logits of a chunk", chunk, 0, 0, "four fp32 tensors, or later the head's scaled gradient", source),
        Line("gradient of the head", 4 * whole * count, 4 * whole * (count - 1), 0, formula, source),
    ]


def gathered(job: Job, stage: Stage, loss: float) -> list[Line]:
    """Return the lines of whole weights, of the layer in use and of the next, and of their unreduced gradients.

    Args:
        loss: bytes of `loss_lines`, 0 on a stage without the head.
    """
    dims, shape = job.dims, job.shape
    if job.zero < 3:
        return []
    if job.flow and job.stack == "deepspeed":
        return _zero3_gathered(job, loss)
    unit = shape.dense_layer_parameters / dims.tp + shape.expert_layer_parameters / (dims.ep * job.mlp_split)
    root = (shape.embedding_parameters + (0 if shape.tied else shape.head_parameters)) / dims.tp
    elements = 2 * unit + root
    tracked = "torch's MemTracker under fully_shard"
    formula, source = "two layers, embedding and head", tracked
    if not job.sharding.reshards:
        elements, formula = sum(stage_parameters(job, stage)), "all of the rank's layers"
    elif job.stack == "deepspeed":  # weights that are needed again soon stay until the backward pass
        elements = max(elements, min(job.live_elements + job.sharding.prefetched, shape.parameters / dims.tp))
        formula, source = "within stage3_max_reuse_distance, and prefetched", "DeepSpeed"
    units = job.gather_bytes * elements
    if job.frozen and job.sharding.reshards:  # ends are not quantized
        units = 2 * job.frozen.layer_bytes * unit + job.element_bytes * root
    reduced, at_loss, behind, of_head = job.states.gradients * unit, units, units, 0.0
    if job.flow and job.stack == "fsdp2":  # as measured in this project's runs (test_tensor_bytes.py)
        reduced = max(0.0, reduced - kept_bytes(job))  # of the layer before, whose activations are gone
        if job.sharding.reshards and stage.head:
            # no layer is gathered while loss and last norm are computed
            at_loss = max(job.gather_bytes * root, units - loss)
            behind = max(job.gather_bytes * root, units - LAST_NORM * job.tokens * shape.hidden)
            of_head = job.gather_bytes * shape.head_parameters / dims.tp if job.trains_head else 0
    return [
        Line("gathered weights", at_loss, behind, 0, formula, source),
        Line("gradient of the whole head", 0, of_head, 0, "until the backward pass has come to the embedding", tracked),
        _second_copies(job),
        Line("reduce buffer", 0, reduced, 0, "one layer's gradients, in place of its activations", tracked),
    ]


def _zero3_gathered(job: Job, loss: float) -> list[Line]:
    """Return what DeepSpeed's ZeRO-3 gathers, as measured in this project's runs (test_tensor_bytes.py).

    It gathers the weights of one module, those of the next ones ahead, and keeps those that are needed again soon. All
    that it gathers ahead at once lies in one buffer, too, until the last of these weights is used.
    """
    shape, dims = job.shape, job.dims
    all_weights, ahead = shape.parameters / dims.tp, job.sharding.prefetched
    largest = max(math.prod(weight) for weight in [*shape.embedding_weights, *shape.layer_weights]) / dims.tp
    whole = job.gather_bytes * max(largest, min(job.live_elements + ahead, all_weights))
    # the last buffer of the forward pass is gone before the loss is computed
    buffer = max(0.0, job.gather_bytes * min(ahead, all_weights) - loss)
    again = job.gather_bytes * min(ahead, all_weights - job.live_elements)
    gone = 0.0 if job.memory_kind == "resident" else kept_bytes(job)  # a process keeps the pages of freed activations
    reduced = max(0.0, job.states.gradients * largest - gone)
    formula = "within stage3_max_reuse_distance, and prefetched"
    return [
        Line("gathered weights", whole, whole, 0, formula, "DeepSpeed"),
        Line("prefetch buffer", buffer, again, 0, "stage3_prefetch_bucket_size elements", "DeepSpeed"),
        _second_copies(job),
        Line("reduce buffer", 0, reduced, 0, "one weight's gradient, in place of a layer's activations", "DeepSpeed"),
    ]


def _second_copies(job: Job) -> Line:
    """Return hpZ's copies, made when a weight is released: those that stay have none when the backward pass begins."""
    ranks, weights = job.strategy.secondary_partition, job.shape.parameters / job.dims.tp
    copied = job.states.weights * (weights - job.live_elements) / ranks if ranks > 1 else 0
    return Line("secondary weights", copied, copied, 0, f"a copy over {ranks} ranks", "arXiv:2306.10209, hpZ")


def gathered_inputs(job: Job, constants: Profile, lines: Sequence[Line]) -> Line:
    """Inputs of products that are whole along the sequence, where sequence parallelism divides what is kept.

    DTensor keeps those of both blocks of a layer for the backward pass, in 16 bits 4 s b h. Under autocast each of five
    products has a copy. Megatron has one buffer for all.
    Elsewhere, the host launches gathers ahead of the GPU: inputs and outputs of some layers' blocks, at most 8 s b h of
    each layer. Where memory is short, torch's allocator waits until their work is done, and frees them.
    """
    dims, name = job.dims, "gathered inputs"
    unit, layers = job.tokens * job.shape.hidden, job.shape.layers / dims.pp
    if dims.tp == 1 or not job.strategy.tp_sequence_parallel:
        return Line(name, 0, 0, 0, "", "")
    if GATHERED.get(job.stack) == "kept":
        of_layer = PRODUCT_INPUTS.get(job.flow, 4) if job.shape.gated else 4
        whole = of_layer * (layers if job.checkpointing == "none" else min(1, layers)) * unit
        return Line(name, whole, whole, 0, f"{of_layer} s b h per layer", "torch.distributed.tensor")
    if GATHERED.get(job.stack) == "one buffer":
        return Line(name, 2 * unit, 2 * unit, 0, "2 s b h", "Megatron's global memory buffer")
    ahead = min(constants.gathered_inputs, 8 * layers) * unit if dims.pp == 1 else 0
    free = AHEAD_SHARE * job.memory_gib * GIB
    forward, backward = (
        max(0, min(ahead, free - sum(getattr(line, moment) for line in lines))) for moment in MOMENTS[:2]
    )
    return Line(name, forward, backward, 0, f"{ahead / unit:.0f} s b h launched ahead, while memory is free", "fitted")


# What PyTorch's pipeline schedules hold beside states and activations (torch 2.13), counted by torch's MemTracker in a
# schedule of one rank (bench/fake_rank.py).


def is_scheduled(job: Job) -> bool:
    """Whether the job runs one of PyTorch's pipeline schedules."""
    return job.strategy.schedule in SCHEDULES and job.dims.pp > 1


def outputs(job: Job, stage: Stage) -> float:
    """Count the bytes that a micro-batch's outputs of a rank's stages keep until its backward pass, in fp32."""
    schedule, ranks = SCHEDULES[job.strategy.schedule], job.dims.pp
    sends = [number for number in schedule.stages(stage.index, ranks) if number + 1 < schedule.num_stages(ranks)]
    return 4 * job.tokens * job.shape.hidden * len(sends)


def kept_until_next_step(job: Job, stage: Stage) -> tuple[float, float, float]:
    """Count what a rank keeps of each micro-batch, always in fp32.

    Stages have buffers for what comes from their neighbours, also from one on the same rank. A backward pass in halves
    leaves the gradients of a stage's inputs. One that is passed on within the rank is in a buffer already.

    Returns:
        Bytes of the buffers; of the inputs' gradients in the backward pass, while other micro-batches keep their
        activations; of these gradients after it.
    """
    schedule, ranks, count = SCHEDULES[job.strategy.schedule], job.dims.pp, job.grad_accum
    own, hidden = schedule.stages(stage.index, ranks), 4 * job.tokens * job.shape.hidden
    neighbours = [
        number + side for number in own for side in (-1, 1) if 0 <= number + side < schedule.num_stages(ranks)
    ]
    cut = _cut_micro_batches(job.strategy.schedule, stage.index, ranks, count) if schedule.folded else ()
    before = count - in_flight(job, stage)[0]
    arrived = [micro_batch for micro_batch in cut if micro_batch < before]
    return len(neighbours) * count * hidden, len(arrived) * hidden, len(cut) * hidden


@lru_cache(maxsize=512)
def _cut_micro_batches(schedule: str, rank: int, ranks: int, count: int) -> tuple[int, ...]:
    """List the micro-batches that leave the gradient of an input that another rank sent."""
    own = SCHEDULES[schedule].stages(rank, ranks)
    passes = (work for entry in order(schedule, rank, ranks, count) for work in entry if work.kind == "I")
    return tuple(work.micro_batch for work in passes if work.stage and work.stage - 1 not in own)


def cast_weights(job: Job, stage: Stage, count: float) -> tuple[float, float]:
    """Count the bytes of 16-bit copies of weights after the forward and in the backward pass.

    Each micro-batch of PyTorch's pipelines casts the layers' weights for itself, because its pass of a stage enters
    autocast anew.

    Args:
        count: micro-batches whose activations are kept.
    """
    if job.flow not in ("copies", "autocast"):
        return 0, 0
    if not is_scheduled(job):
        is_recomputed = job.flow == "copies" and job.checkpointing != "none"  # such a layer casts its weights again
        copies = 2 * job.trained * sum(stage_parameters(job, replace(stage, layers=1) if is_recomputed else stage))
        return copies, copies
    of_layers = replace(stage, embedding=False, head=False)
    layers = 2 * job.trained * sum(stage_parameters(job, of_layers))
    head = 2 * job.shape.head_parameters / job.dims.tp if stage.head and job.trains_head else 0
    if job.repeats_layers:
        return layers + head, 2 * job.trained * sum(stage_parameters(job, replace(of_layers, layers=1)))
    return layers * count + head, layers * count
