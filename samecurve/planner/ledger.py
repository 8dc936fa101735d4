"""Bytes that a rank exchanges in one step, by collective, as PyTorch's profiler counts them.

A call counts the larger of its input and output. DeepSpeed's numbers are those of 0.19: ZeRO-1 and 2 all-reduce whole
gradients (`use_multi_rank_bucket_allreduce`), where the textbook has a reduce-scatter, and ZeRO-3 gathers weights once
per micro-batch and, of a large model, those once more that `stage3_max_reuse_distance` does not keep.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from samecurve.planner.job import Job
from samecurve.planner.model_shape import elements
from samecurve.planner.stages import Stage, stages
from samecurve.strategy.timetables import SCHEDULES

FP32, FP64, INT64 = 4, 8, 8
FLAT_ALIGNMENT = 2  # elements per rank to which ZeRO-1 and 2 align each parameter group


@dataclass(frozen=True)
class Exchange:
    """Calls of one collective with one content: bytes per step and rank."""

    axis: str
    collective: str
    content: str
    num_bytes: int


def ledger(job: Job, stage: Stage, trained_tokens: float | None = None) -> list[Exchange]:
    """List what one rank of a stage exchanges in a step.

    Args:
        job: a strategy that this version runs.
        stage: of stages.stages.
        trained_tokens: per step and rank of dp x cp, as the loss of a tensor-parallel group is computed of these
            alone; default: all.
    """
    if job.dims.world_size == 1:
        return []
    exchanges = [*_numbers(job)]
    if job.dims.tp > 1:
        exchanges += _tensor_parallel(job, stage, trained_tokens)
    if job.dims.cp > 1:
        exchanges += _context_parallel(job)
    if job.dims.ep > 1:
        # tokens to their experts, outputs back, and the gradients of both, if routers spread tokens evenly
        shape, forwards = job.shape, 2 if job.repeats_layers else 1
        tokens = job.grad_accum * shape.layers * round(job.tokens) * shape.top_k
        counts = forwards * INT64 * job.grad_accum * shape.layers * shape.experts
        sent = 2 * (forwards + 1) * job.element_bytes * tokens * shape.hidden
        exchanges.append(Exchange("ep", "all_to_all", "tokens for experts", sent + counts))
    if job.strategy.schedule in SCHEDULES:
        exchanges += _scheduled(job, stage)
    elif job.dims.pp > 1:
        exchanges += _pipeline(job, stage)
    elif job.stack == "fsdp2":
        exchanges += _fully_sharded(job)
    elif job.stack == "deepspeed":
        exchanges += _zero3(job) if job.zero == 3 else _zero(job)
    elif job.dims.dp > 1:
        exchanges.append(Exchange("dp", "all_reduce", "gradients", _gradient_bytes(job)))
    return [exchange for exchange in exchanges if exchange.num_bytes]


def ledgers(job: Job) -> dict[str, list[Exchange]]:
    """Return the ledger of each class of ranks, by the name of its stage."""
    return {stage.name: ledger(job, stage) for stage in stages(job, by_cost=False)}


def _cut(job: Job, weights: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the shapes of a rank's parts of weights under tensor parallelism, which cuts matrices only."""
    return [(rows // job.dims.tp, columns) if columns > 1 else (rows, columns) for rows, columns in weights]


def _elements(job: Job, weights: Iterable[tuple[int, int]]) -> int:
    return elements(_cut(job, weights))


def _gradient_bytes(job: Job) -> int:
    return round(FP32 * job.trained * _elements(job, job.shape.weights))


def _padded(job: Job, parts: Iterable[tuple[int, int]]) -> int:
    """Elements of an FSDP2 unit; each weight's rows are padded to a multiple of the ranks that share it."""
    ranks = max(job.shard, 1)
    return sum(-(-rows // ranks) * ranks * columns for rows, columns in parts)


def _numbers(job: Job) -> Iterator[Exchange]:
    """Yield single numbers: a flag of the control group, losses and norms.

    Token counts are left out: the loader's thread sums them steps ahead, and no profile sees it.
    """
    dims, fp32 = job.dims, job.precision == "fp32"
    yield Exchange("all", "all_reduce", "stop flag", 1)
    if job.strategy.schedule in SCHEDULES:  # loss and the squares of own and of tied gradients
        yield Exchange("all", "all_reduce", "loss, norm", 3 * FP64)
        return
    if dims.pp > 1:
        yield Exchange("all", "all_reduce", "loss, squares of gradients", 3 * FP64)
        yield Exchange("pp", "broadcast", "loss", 2 * FP32)
        # DeepSpeed's overflow flag and norm: its ZeRO-1, which is that of fp32, sums them over replicas first
        yield Exchange("dp", "all_reduce", "overflow, norm", 2 * FP32 if fp32 else 0)
        yield Exchange("pp", "all_reduce", "overflow, norm", (2 if fp32 else 1) * FP32)
        return
    yield Exchange("dp", "all_reduce", "loss sum", FP64 if dims.dp * dims.cp > 1 else 0)
    doubles = singles = flags = 0
    if job.stack == "fsdp2" or dims.tp > 1:
        doubles = 1  # norm of gradients of which each rank has a part
    elif job.stack == "deepspeed":
        offloaded = job.updates_on_host
        if job.zero == 3 and not offloaded:
            doubles = 2
        elif not (job.zero == 1 and job.precision == "bf16"):  # where every rank has all gradients
            singles = 2
            flags = 1 if job.zero < 3 and not fp32 else 0  # overflow, which DeepSpeed does not look for in fp32
    yield Exchange("all", "all_reduce", "norms", doubles * FP64 + singles * FP32 + flags)


def _fully_sharded(job: Job) -> list[Exchange]:
    """FSDP2: each layer is gathered for forward and backward; the last unit (head, tied embedding) once.

    Of experts that are spread, those are gathered that other ranks hold, too.
    """
    shape, dims, count = job.shape, job.dims, job.grad_accum
    if dims.ep == 1:
        mlp = _padded(job, _cut(job, shape.mlp_weights))
    else:
        mlp = 0 if job.shard == dims.ep else elements(shape.mlp_weights) // dims.ep
    attention = _padded(job, _cut(job, shape.attention_weights))
    layers = shape.layers * (attention + _padded(job, shape.router_weights) + mlp)
    embedding, last = _padded(job, _cut(job, shape.embedding_weights)), [*shape.final_weights, *shape.head_weights]
    if shape.tied:
        last, embedding = [*last, *shape.embedding_weights], 0
    once, twice = _padded(job, _cut(job, last)), layers + embedding
    reduced = round(job.reduce_bytes * (once + twice)) * (1 if job.sharding.reduces_once else count)
    gathered = once + (2 if job.sharding.reshards else 1) * twice
    replicas = dims.dp // max(job.shard, 1)
    return [
        Exchange("dp", "all_gather", "weights", round(count * job.gather_bytes * gathered)),
        Exchange("dp", "reduce_scatter", "gradients", reduced),
        Exchange("dp", "all_reduce", "shards, over replicas", reduced // job.shard if replicas > 1 else 0),
    ]


def _zero(job: Job) -> list[Exchange]:
    """ZeRO-1 reduces once per step, ZeRO-2 after every micro-batch; both gather updated weights."""
    count = job.grad_accum if job.zero == 2 else 1
    return [
        Exchange("dp", "all_reduce", "gradients", count * _gradient_bytes(job)),
        Exchange("dp", "all_gather", "weights", _updated_bytes(job, job.shape.weights)),
    ]


def _updated_bytes(job: Job, weights: Sequence[tuple[int, int]]) -> int:
    """Bytes of the two groups of weights, with and without decay, that ZeRO-1 and 2 gather after the update."""
    aligned = FLAT_ALIGNMENT * job.dims.dp
    groups = [[weight for weight in weights if (weight[1] > 1) == decayed] for decayed in (True, False)]
    gathered = sum(-(-_elements(job, group) // aligned) * aligned for group in groups)
    return round(job.trained * job.element_bytes * gathered)


def _tensor_parallel(job: Job, stage: Stage, trained_tokens: float | None) -> list[Exchange]:
    """Sums over the group: one per layer of attention, one of the MLP, forward and backward, and of the embeddings.

    With sequence parallelism each sum within the layers is a reduce-scatter behind a block and an all-gather in front
    of the next, which send as much; and the sequence is cut and joined at the two ends. Autocast casts below the point
    where gradients are summed, so that these are fp32; so are the embeddings and what a norm returns. The loss
    exchanges three fp32 numbers per token and the hidden state's gradient; in a pipeline of all tokens, trained or not.
    """
    shape, count = job.shape, job.grad_accum
    layers = round(stage.layers) if job.dims.pp > 1 else shape.layers
    width, hidden = job.element_bytes, count * round(job.tokens) * job.shape.hidden
    blocks = 1 if job.mlp_split < job.dims.tp else 2  # attention, and the MLP if it is cut
    inner = blocks * layers * hidden
    # PyTorch stops to recompute a layer in front of the MLP's sum, which the backward pass does not need
    gathered, summed = (1, 1 / blocks) if job.repeats_layers else (0, 0)
    tokens = count * round(job.tokens) if trained_tokens is None or job.dims.pp > 1 else trained_tokens
    embedded = stage.embedding * hidden * FP32
    loss = Exchange("tp", "all_reduce", "loss", stage.head * round(tokens * (3 * FP32 + width * shape.hidden)))
    if not job.strategy.tp_sequence_parallel:
        return [
            Exchange("tp", "all_reduce", "hidden states", embedded + round(inner * width * (1 + summed))),
            Exchange("tp", "all_reduce", "gradients of hidden states", inner * FP32),
            loss,
        ]
    return [
        Exchange("tp", "all_reduce", "embeddings", hidden * FP32),
        Exchange("tp", "all_gather", "hidden states", inner * FP32 * (1 + gathered) + hidden * FP32),
        Exchange("tp", "reduce_scatter", "hidden states", round(inner * width * (1 + summed))),
        Exchange("tp", "all_gather", "gradients of hidden states", inner * width + hidden * FP32),
        Exchange("tp", "reduce_scatter", "gradients of hidden states", inner * FP32),
        Exchange("tp", "all_reduce", "gradients of norms", FP32 * (2 * shape.layers + 1) * shape.hidden),
        loss,
    ]


def _context_parallel(job: Job) -> list[Exchange]:
    """Queries, keys, values and outputs under Ulysses, else keys and values of whole rows; back as gradients.

    Round a ring of n travel n - 1 blocks of keys and values forward, and as many backward with fp32 gradients.
    """
    shape, dims = job.shape, job.dims
    forwards = 2 if job.repeats_layers else 1
    bytes_per_feature = job.grad_accum * shape.layers * job.element_bytes * round(job.tokens)
    width = shape.attention_width // dims.tp
    keys = width * shape.kv_heads // shape.heads
    if job.exchange == "ulysses":
        repeated = keys * (dims.cp // math.gcd(shape.kv_heads // dims.tp, dims.cp))  # so that cp divides them
        sent = bytes_per_feature * 2 * (width + repeated)
        return [Exchange("cp", "all_to_all", "heads for sequence", (forwards + 1) * sent)]
    block = bytes_per_feature * 2 * keys
    if job.exchange == "ring":
        blocks, gradients = (forwards + 1) * block, block * FP32 // job.element_bytes
        return [
            Exchange("cp", passing, content, (dims.cp - 1) * num_bytes)
            for content, num_bytes in (("keys and values", blocks), ("gradients of keys and values", gradients))
            for passing in ("send", "recv")
        ]
    gathered = block * dims.cp
    return [
        Exchange("cp", "all_gather", "keys and values", forwards * gathered),
        Exchange("cp", "reduce_scatter", "gradients of keys and values", gathered),
    ]


def _pipeline(job: Job, stage: Stage) -> list[Exchange]:
    """Hidden states and positions to the next stage, their gradients back; over replicas, gradients and new weights."""
    shape, count = job.shape, job.grad_accum
    hidden = count * job.element_bytes * round(job.tokens) * shape.hidden
    positions = count * INT64 * round(job.tokens)
    own = _held(job, stage)
    shares = shape.tied and (stage.embedding or stage.head)
    before, after = stage.index > 0, not stage.head
    replicated = job.dims.dp > 1
    return [
        Exchange("pp", "send", "hidden states", after * (hidden + positions) + before * hidden),
        Exchange("pp", "recv", "hidden states", before * (hidden + positions) + after * hidden),
        Exchange("pp", "all_reduce", "gradients of the tied embedding", shares * FP32 * shape.head_parameters),
        Exchange("dp", "all_reduce", "gradients", FP32 * _elements(job, own)),
        Exchange("dp", "all_gather", "weights", replicated * _updated_bytes(job, own)),
        Exchange("dp", "all_reduce", "loss", replicated * stage.head * FP32),
    ]


def _scheduled(job: Job, stage: Stage) -> list[Exchange]:
    """Hidden states to the next stage and their gradients back, where that is on another rank; always fp32.

    Args:
        stage: that of a rank, which may have several of the pipeline's stages.
    """
    shape, dims, schedule = job.shape, job.dims, SCHEDULES[job.strategy.schedule]
    hidden = FP32 * job.grad_accum * round(job.tokens) * shape.hidden
    ranks = [schedule.rank(number, dims.pp) for number in range(schedule.num_stages(dims.pp))]
    apart = [pair for pair in pairwise(ranks) if pair[0] != pair[1]]
    crossed = sum(stage.index in pair for pair in apart)  # each sends one way and receives the other
    shares = shape.tied and stage.embedding != stage.head
    tied = shares * FP32 * shape.head_parameters // dims.tp // job.shard
    own = FP32 * _elements(job, _held(job, stage))
    return [
        Exchange("pp", "send", "hidden states and their gradients", crossed * hidden),
        Exchange("pp", "recv", "hidden states and their gradients", crossed * hidden),
        Exchange("pp", "all_reduce", "gradients of the tied embedding", tied),
        Exchange("dp", "all_gather", "weights", (job.shard > 1) * own),
        Exchange("dp", "reduce_scatter", "gradients", (job.shard > 1) * own),
        Exchange("dp", "all_reduce", "gradients", (dims.dp > job.shard) * own // job.shard),
    ]


def _held(job: Job, stage: Stage) -> list[tuple[int, int]]:
    """List a stage's weights, a tied embedding of the last stage among them."""
    shape = job.shape
    holds_embedding = stage.embedding or (shape.tied and stage.head)
    weights = [*shape.embedding_weights] if holds_embedding else []
    weights += round(stage.layers) * [*shape.layer_weights]
    return weights + ([*shape.final_weights, *shape.head_weights] if stage.head else [])


def _zero3(job: Job) -> list[Exchange]:
    """ZeRO-3 gathers large weights and reduces all gradients in each micro-batch.

    Each size is padded to a multiple of the ranks. Small weights stay whole on every rank. A large one is gathered for
    its forward pass, and again for the backward pass unless it stayed: it does if the weights that are used in between
    have fewer elements than `stage3_max_reuse_distance`, or if the whole model is gathered ahead.
    """
    shape, ranks, count, distance = job.shape, job.shard, job.grad_accum, job.sharding.reuse_distance
    if shape.parameters <= job.sharding.prefetched:
        distance = math.inf
    passes = 3 if job.repeats_layers else 2  # that later weights make between the two uses
    sizes = [math.prod(weight) for weight in shape.weights]
    small = large = gathered = 0
    following = sum(sizes) + (shape.head_parameters if shape.tied else 0)
    for index, size in enumerate(sizes):  # in their order of use
        following -= size
        padded = -(-size // ranks) * ranks
        if size <= job.sharding.persistent:
            small += padded
            continue
        large += padded
        if index == 0 and shape.tied:  # embedding, head, and both again; the head's two uses follow one another
            between = following - shape.head_parameters
            times = 1 if between < distance else 3 if distance else 4
        else:
            times = 1 if passes * following < distance else 2
        gathered += times * padded
    return [
        Exchange("dp", "all_gather", "weights", round(job.gather_bytes * count * gathered)),
        Exchange("dp", "all_gather", "small weights, after the update", round(job.trained * job.element_bytes * small)),
        Exchange("dp", "reduce_scatter", "gradients", round(count * job.reduce_bytes * (large + small))),
    ]
