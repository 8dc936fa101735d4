"""Seconds of one optimizer step, by part. What is hidden behind computation is not counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property

from samecurve.planner import kernels, links
from samecurve.planner.activations import expert_imbalance
from samecurve.planner.data_parallel_time import data_seconds
from samecurve.planner.hardware import BY_COST, Profile, profile
from samecurve.planner.job import Job, axis_link
from samecurve.planner.links import Link
from samecurve.planner.stages import Stage, shard_sizes, stage_parameters, stages
from samecurve.strategy.timetables import SCHEDULES, idle_slots

HIDDEN_TENSOR_PARALLEL = 0.5  # share of collectives that overlapped products leave exposed (assumed)
SEND_SECONDS = 100e-6  # host time of one send to a neighbouring stage (assumed)
GRADIENT_BYTES = 4  # of keys' and values' gradients on their way around a ring
COLLECTIVE_SECONDS = 20e-6  # host time of one collective inside a layer (assumed)
UPDATE_BYTES = 40  # of fp32 master weight, gradient and moments that Adam reads and writes per parameter
MASTER_BYTES = 4  # of FSDP2's weights, which it casts on the GPU
CORE_GB_PER_S = 2  # host memory traffic of one core in the update (assumed)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a stage, `breakdown` of the slowest one."""

    compute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline_sends: float
    data_parallel: float
    bubble: float = 0
    optimizer: float = 0
    offload: float = 0
    host: float = 0

    @cached_property
    def total(self) -> float:
        return sum(vars(self).values())


def breakdown(job: Job, constants: Profile | None = None) -> StepTime:
    """Predict the step time of a job."""
    constants = constants or profile(job.stack)
    dims, classes = job.dims, stages(job, job.stack in BY_COST)
    slots = [micro_batch_time(job, stage, constants) for stage in classes]
    round_trip = sum(stage.ranks * slot.total for stage, (slot, _) in zip(classes, slots, strict=True))
    # a rank waits for the other stages, which may be faster than itself
    waits = idle_slots(job.strategy.schedule, dims.pp, job.grad_accum, job.virtual_stages) / max(dims.pp - 1, 1)
    times = [
        _step_time(job, stage, constants, slot, reduced, waits * (round_trip - slot.total))
        for stage, (slot, reduced) in zip(classes, slots, strict=True)
    ]
    return max(times, key=lambda time: time.total)


def stage_time(job: Job, stage: Stage, constants: Profile) -> StepTime:
    """Predict the step time of one stage's ranks without what they wait for other stages."""
    return _step_time(job, stage, constants, *micro_batch_time(job, stage, constants), idle=0)


def micro_batch_time(job: Job, stage: Stage, constants: Profile) -> tuple[StepTime, float]:
    """Predict what a micro-batch takes on one stage's ranks, without the parts that come once per step.

    Returns:
        The parts, and the seconds of data-parallel communication once per step.
    """
    one = kernels.layer(job, constants)
    compute = stage.layers * one.total
    if stage.head:
        compute += kernels.head(job, constants).total
    if job.teacher:  # its ranks share it as they do the student
        taught = replace(job, shape=job.teacher, teacher=None, checkpointing="none")
        compute += job.teacher.layers / job.dims.pp * kernels.layer(taught, constants).forward
        compute += kernels.head(taught, constants).forward if stage.head else 0
    tensor, context, expert = (
        stage.layers * part(job, constants) for part in (tensor_seconds, context_seconds, expert_seconds)
    )
    # what kernels and collectives leave of the floor is spent waiting for the slowest host; as a part of the backward
    # pass, so that recomputation, which fills it, cannot hide more communication than it takes
    per_rank_us = constants.rank_floor_us if job.dims.pp == 1 else constants.pipeline_rank_floor_us
    floor = job.dims.tp * per_rank_us * 1e-6 if job.dims.tp > 1 else 0
    waits = max(0.0, floor - one.total - tensor / max(stage.layers, 1))
    gathered, reduced = data_seconds(job, stage, constants, one + kernels.Seconds(0, waits))
    slot = StepTime(
        compute=compute,
        tensor_parallel=tensor + stage.layers * waits,
        context_parallel=context,
        expert_parallel=expert,
        # forward and backward, of each of the rank's stages
        pipeline_sends=job.virtual_stages * 2 * send_seconds(job, constants) if job.dims.pp > 1 else 0,
        data_parallel=gathered,
    )
    return slot, reduced


def _step_time(job: Job, stage: Stage, constants: Profile, slot: StepTime, reduced: float, idle: float) -> StepTime:
    """Add up a step of one stage's ranks: `micro_batch_time`'s results, and the wait for other stages."""
    count = job.grad_accum
    dense, experts = stage_parameters(job, stage)
    ranks = shard_sizes(job) if job.zero else (1, 1)
    kept = dense / ranks[0] + experts / ranks[1]
    each_micro_batch = {part: count * seconds for part, seconds in asdict(slot).items()}
    parts = StepTime(**each_micro_batch | {
        "data_parallel": each_micro_batch["data_parallel"] + reduced,
        "bubble": idle,
        "optimizer": kernels.optimizer(job, kept, constants),
        "offload": offload_seconds(job, kept),
        "host": kernels.step_seconds(job, constants),
    })  # fmt: skip
    learnt = job.calibration
    if not learnt:
        return parts
    # each part is multiplied by what runs on these machines say
    return StepTime(**{part: value * learnt.time_factor(part, job.library) for part, value in asdict(parts).items()})


def tensor_seconds(job: Job, constants: Profile) -> float:
    """Seconds of one layer's tensor-parallel collectives, forward and backward.

    Two all-reduces each way, of attention and MLP; with sequence parallelism each is a reduce-scatter and an
    all-gather. Full recomputation repeats the forward's.
    """
    size = job.dims.tp
    if size == 1:
        return 0
    over = axis_link(job, "tp", constants)
    hidden = job.element_bytes * job.tokens * job.shape.hidden
    volume = links.all_reduce_volume(hidden, size)
    call = links.collective_seconds(volume, size, over, hidden)
    blocks = 2 if job.mlp_split == size else 1
    calls = blocks * (3 if job.repeats_layers else 2)
    shown = HIDDEN_TENSOR_PARALLEL if job.async_tp else 1
    return calls * (call * shown + COLLECTIVE_SECONDS)


def context_seconds(job: Job, constants: Profile) -> float:
    """Exposed seconds of the exchange of keys in one layer.

    Around a ring see `ring_sends`. Gathered keys travel once each way, not
    hidden; so do queries, keys, values and outputs under Ulysses, of which a rank keeps 1 / n.
    """
    size = job.dims.cp
    if size == 1:
        return 0
    if job.exchange == "ring":
        communication, attention = ring_seconds(job, constants)
        return max(0.0, communication - attention) + ring_sends(job)[0] * COLLECTIVE_SECONDS
    over, keys = axis_link(job, "cp", constants), key_bytes(job)
    queries = keys / job.shape.kv_share / 2
    # under Ulysses one call for queries, keys and values, one for outputs
    payloads = [queries + keys, queries] if job.exchange == "ulysses" else [size * keys]
    passes = 3 if job.repeats_layers else 2
    return passes * sum(_exchange_seconds(payload, size, over) + COLLECTIVE_SECONDS for payload in payloads)


def _exchange_seconds(payload_bytes: float, ranks: int, over: Link) -> float:
    """Seconds of an all-gather to so many bytes, or of an all-to-all in which each rank holds so many."""
    return links.collective_seconds(links.all_gather_volume(payload_bytes, ranks), ranks, over)


def key_bytes(job: Job) -> float:
    """Return the bytes of a rank's keys and values in one layer."""
    return job.element_bytes * job.tokens * 2 * job.shape.attention_width * job.shape.kv_share / job.dims.tp


def ring_sends(job: Job) -> tuple[int, float]:
    """Return how often a rank sends on a block around the ring in one layer, and the bytes of all that.

    Keys and values go n - 1 times forward, and again backward and in full recomputation; their gradients once, in fp32.
    """
    steps, passes = job.dims.cp - 1, 3 if job.repeats_layers else 2
    of_gradients = key_bytes(job) * GRADIENT_BYTES / job.element_bytes
    return steps * (passes + 1), steps * (passes * key_bytes(job) + of_gradients)


def ring_seconds(job: Job, constants: Profile) -> tuple[float, float]:
    """Return the seconds of a layer's sends around the ring, and of the attention to other ranks' keys beside them."""
    size, over = job.dims.cp, axis_link(job, "cp", constants)
    sends, sent = ring_sends(job)
    attention = kernels.attention_seconds(job, constants)
    seconds = attention.total + (attention.forward if job.repeats_layers else 0)
    # a rank computes its own block's attention without waiting
    return sent / (over.bus_gb_per_s * 1e9) + sends * over.step_seconds, seconds * (size - 1) / size


def expert_seconds(job: Job, constants: Profile) -> float:
    """Seconds of dispatch and combine in one layer: two all-to-alls of top_k copies each pass, and once more in full
    recomputation.
    """
    size = job.dims.ep
    if size == 1 or not job.shape.experts:
        return 0
    over = axis_link(job, "dp", constants, size)
    payload = job.element_bytes * job.tokens * job.shape.top_k * job.shape.hidden / job.mlp_split
    calls = 6 if job.repeats_layers else 4
    return calls * expert_imbalance(job) * _exchange_seconds(payload, size, over)


def send_seconds(job: Job, constants: Profile) -> float:
    """Seconds of one message between neighbouring stages: s b h."""
    over = axis_link(job, "pp", constants, 2)
    width = 4 if job.strategy.schedule in SCHEDULES else job.element_bytes  # PyTorch's stages exchange fp32
    sent = width * job.tokens * job.shape.hidden / job.sequence_split
    return sent / (over.bus_gb_per_s * 1e9) + SEND_SECONDS


def offload_seconds(job: Job, shard: float) -> float:
    """Return the seconds of one step's transfers and updates outside of the GPU.

    Computation hides none of the transfers, and the host's cores share the update of all GPUs of a node. No time is
    measured yet, so that intervals are wider.

    Args:
        shard: parameters whose optimizer states belong to the rank.
    """
    if not job.strategy.offload:
        return 0
    lanes = job.host.pcie_gb_per_s * 1e9
    disk = job.host.nvme_gb_per_s * 1e9 / job.gpus_per_node
    trained, sharding, total = job.trained * shard, job.sharding, 0.0
    moves_weights = any(target.startswith("param:") for target in job.strategy.offload)
    if job.updates_on_host:
        # micro-batches' gradients are summed on the host; weights that stay on the GPU come back once
        times = 1 if sharding.reduces_once else job.grad_accum
        total += times * job.states.gradients * shard / lanes
        total += 0 if moves_weights else job.element_bytes * trained / lanes
        total += UPDATE_BYTES * trained * job.gpus_per_node / (CORE_GB_PER_S * 1e9 * job.host.cpu_cores)
    if "optimizer:nvme" in job.strategy.offload:
        total += 2 * 12 * trained / disk  # master weight and moments, read and written
    if moves_weights:
        rate = disk if "param:nvme" in job.strategy.offload else lanes
        moved = (job.element_bytes if job.stack == "deepspeed" else MASTER_BYTES) * trained
        moved += job.frozen.weight_bytes * shard if job.frozen else 0
        total += (1 + sharding.reshards) * job.grad_accum * moved / rate  # for forward and backward
    return total
