"""Division of a pipeline's layers over its stages, and the micro-batches that a stage keeps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from samecurve.planner.job import Job
from samecurve.planner.model_shape import ModelShape
from samecurve.strategy.timetables import SCHEDULES, micro_batches_kept

# Schedules that repeat themselves between their start and their end, so that further micro-batches keep nothing more.
STEADY = ("1F1B", "ZBVZeroBubble", "DualPipeV")
ENOUGH = 3  # micro-batches per rank, of which the steady part is one at least


@dataclass(frozen=True)
class Stage:
    """One class of ranks: the first, a middle or the last stage.

    Attributes:
        index: the rank whose layers and kept micro-batches stand for all of the class.
        ranks: of a pipeline, that are of this class.
    """

    name: str
    index: int
    layers: float
    embedding: bool
    head: bool
    ranks: int = 1


def stages(job: Job, by_cost: bool) -> list[Stage]:
    """List the classes of stages of a job, one entry without a pipeline.

    Args:
        by_cost: whether the head counts as the layers that it costs (nanotron), or layers are spread evenly and, where
            the count does not divide, embedding and head count as one layer each (Megatron's and zero-bubble's habit).
    """
    size, layers = job.dims.pp, job.shape.layers
    if size == 1:
        return [Stage("only", 0, layers, True, True)]
    if job.strategy.schedule in SCHEDULES:
        schedule = SCHEDULES[job.strategy.schedule]
        per_stage = schedule.layers(layers, size)
        per_rank = [sum(per_stage[stage] for stage in schedule.stages(rank, size)) for rank in range(size)]
        return _divided(per_rank, schedule.folded)
    if job.strategy.schedule == "deepspeed":
        return _divided(divide(job.shape, size, job.strategy.pipeline_partition))
    head = job.shape.head_parameters / job.shape.layer_parameters  # its cost in layers
    if by_cost:
        most = min(layers, math.ceil((layers + head) / size))
        first, last = most, max(0, layers - most * (size - 1))
    elif layers % size == 0:
        most = first = last = layers // size
    else:
        most = math.ceil((layers + 2) / size)
        first = last = most - 1 if most * size - 2 == layers else most
    # of the middle stages, the first keeps the most micro-batches
    middle = [Stage("middle", 1, most, False, False, size - 2)] if size > 2 else []
    return [Stage("first", 0, first, True, False), *middle, Stage("last", size - 1, last, False, True)]


def _divided(layers: Sequence[int], is_folded: bool = False) -> list[Stage]:
    """List the classes of ranks by each rank's number of layers: the ends, and the fullest of the middle."""
    ranks = len(layers)
    if is_folded:
        between = range(1, ranks)
        ends = [Stage("first and last", 0, layers[0], True, True)]
    else:
        between = range(1, ranks - 1)
        ends = [Stage("first", 0, layers[0], True, False), Stage("last", ranks - 1, layers[-1], False, True)]
    fullest = [max(between, key=lambda rank: layers[rank])] if between else []
    middle = [Stage("middle", rank, layers[rank], False, False, len(between)) for rank in fullest]
    return [ends[0], *middle, *ends[1:]]


def in_flight(job: Job, stage: Stage, cut_share: float = 0.0) -> tuple[float, float]:
    """Count the micro-batches whose activations a stage keeps at its peak, and those of a backward pass in two halves.

    1F1B keeps p - i at stage i. Interleaving keeps 1 + (p - 1) / (p v) times as many on the first one
    (arXiv:2104.04473); ZB-2p twice as many and ZB-1p as many as the first stage of 1F1B, everywhere (arXiv:2401.10241).
    PyTorch's schedules are counted along their order, with `cut_share` as in timetables.micro_batches_kept.
    """
    if job.dims.pp > 1 and job.strategy.schedule in SCHEDULES:
        name, ranks = job.strategy.schedule, job.dims.pp
        if name == "GPipe":  # all, without their order
            return job.grad_accum, 0
        count = min(job.grad_accum, ENOUGH * ranks) if name in STEADY else job.grad_accum
        return micro_batches_kept(name, stage.index, ranks, count, cut_share)
    size, count, schedule = job.dims.pp, job.grad_accum, job.strategy.schedule
    kept = size - stage.index + ((size - 1) / job.virtual_stages if job.virtual_stages > 1 else 0)  # 1F1B
    kept = {"gpipe": count, "zb-2p": 2 * size - 1, "zb-1p": size}.get(schedule, kept)
    return (min(kept, count) if size > 1 else 1), 0


def stage_parameters(job: Job, stage: Stage) -> tuple[float, float]:
    """Return (parameters of a rank without experts, expert parameters) before sharding over data-parallel ranks."""
    shape, dims = job.shape, job.dims
    dense = stage.layers * shape.dense_layer_parameters
    dense += shape.embedding_parameters if stage.embedding else 0
    # a tied head that is on another stage than the embedding is a copy
    needs_head = stage.head and (not shape.tied or not stage.embedding)
    dense += shape.head_parameters if needs_head else 0
    dense += shape.hidden if stage.head else 0  # the last norm
    return dense / dims.tp, stage.layers * shape.expert_layer_parameters / (dims.ep * job.mlp_split)


def shard_sizes(job: Job) -> tuple[float, float]:
    """Return the ranks that share one copy of dense states, and of expert states.

    FSDP cuts a layer's stacked experts between experts, so that 4 of them fill 4 of 8 ranks.
    """
    whole, experts = max(job.shard, 1), job.shape.experts
    if job.flow and job.stack == "fsdp2" and experts and job.dims.ep == 1:
        return whole, experts / math.ceil(experts / whole)
    return whole, max(whole / job.dims.ep, 1)


def divide(shape: ModelShape, stages: int, partition: str) -> list[int]:
    """Return the decoder layers of each stage; embeddings, layers, last norm and head are divided in this order.

    By parameters or types, the largest and the smallest sum of a stage differ least, as under DeepSpeed. Of equal
    divisions, it is that of DeepSpeed 0.19's `partition_balanced`: in each step of its dynamic program, the last.

    Args:
        partition: `pipeline.partition` of a DeepSpeed JSON: parameters, uniform, or type: and a regular expression.
    """
    names = ["TokenEmbedding", *(["PositionEmbedding"] if shape.positions else []), *["Decoder"] * shape.layers]
    names += ["FinalNorm", "TokenEmbedding" if shape.tied else "HeadLayer"]  # as models/pipeline_split.py names them
    sizes = {
        "TokenEmbedding": shape.vocab * shape.hidden,
        "PositionEmbedding": shape.positions * shape.hidden,
        "Decoder": round(shape.layer_parameters),
        "FinalNorm": shape.hidden,
        "HeadLayer": shape.head_parameters,
    }
    if partition.startswith("type:"):
        wanted = re.compile(partition.partition(":")[2], re.IGNORECASE)
        weights = tuple(int(bool(wanted.search(name))) for name in names)
    else:
        weights = tuple(sizes[name] for name in names)
    if partition == "uniform":  # the first stages have one more
        size, rest = divmod(len(names), stages)
        ends = [part * size + min(part, rest) for part in range(stages + 1)]
    elif len(weights) <= stages:
        ends = [min(part, len(weights)) for part in range(stages + 1)]
    else:
        ends = [len(weights)]
        for parts in range(stages, 0, -1):
            ends.insert(0, _table(weights, parts)[ends[0]][2])
    return [names[start:end].count("Decoder") for start, end in pairwise(ends)]


@lru_cache(maxsize=1024)
def _table(weights: tuple[int, ...], parts: int) -> dict[int, tuple[int, int, int]]:
    """Divide the first items, of every number, into parts: the largest and the smallest, and where the last starts."""
    sums = [0, *accumulate(weights)]
    if parts == 1:
        return {end: (sums[end], sums[end], 0) for end in range(1, len(sums))}
    before, table = _table(weights, parts - 1), {}
    for end in range(parts, len(sums)):
        least_cost = None
        for start in range(end - 1, parts - 2, -1):
            own = sums[end] - sums[start]
            # the smallest of the parts before is at most their mean, so all further ones cost more
            if least_cost is not None and (own - least_cost) * (parts - 1) > sums[start]:
                break
            most, least, _ = before[start]
            largest, smallest = most if most > own else own, least if least < own else own
            if least_cost is None or largest - smallest < least_cost:
                least_cost = largest - smallest
                table[end] = largest, smallest, start
    return table
