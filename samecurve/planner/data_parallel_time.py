"""Seconds that data-parallel ranks spend to gather weights and to reduce gradients, and what of it is hidden."""

from __future__ import annotations

from samecurve.planner import collectives
from samecurve.planner.group_links import axis_link, group_link
from samecurve.planner.job import Job
from samecurve.planner.kernels import Seconds
from samecurve.planner.profiles import Profile, syncs_every_micro_batch
from samecurve.planner.stages import Stage, stage_parameters

_BUCKET_BYTES = 25e6  # of DDP's gradient buckets, torch's default


def data_seconds(job: Job, stage: Stage, constants: Profile, one: Seconds) -> tuple[float, float]:
    """Return the exposed seconds of data-parallel communication (per micro-batch, per step).

    Args:
        job: strategy, batch and machines.
        stage: the part of the model that the rank holds.
        constants: of the strategy's stack.
        one: seconds of one layer's forward and backward, behind which communication may hide.
    """
    gathered, reduced = data_collectives(job, stage, constants)
    share = hidden_share(job, constants)
    behind = stage.layers * one.backward
    if job.sharding.gathers_once:
        return 0, gathered + _exposed(reduced, behind, share)
    if job.layout.zero == 3:  # of each layer, hidden behind the layer before
        again = gathered_again(job, stage, gathered, constants)
        forward, backward = (_exposed(gathered, stage.layers * one.forward, share), _exposed(again, behind, share))
        with_gradients = _exposed(again + reduced, behind, share)
        if job.sharding.reduces_once:
            return forward + backward, with_gradients - backward
        return forward + with_gradients, 0
    if syncs_every_micro_batch(job.stack, job.layout.zero, job.layout.pp > 1):
        # not hidden: published runs of this kind take 3 to 30 times as long
        return reduced, 0
    if reduces_each_micro_batch(job):
        return _exposed(reduced, behind, share), gathered
    if job.stack == "deepspeed":  # gathers what it has updated before the next step
        return 0, _exposed(reduced, behind, share) + gathered
    return 0, _exposed(reduced + gathered, behind, share)


def gathered_again(job: Job, stage: Stage, gathered: float, constants: Profile) -> float:
    """Return the seconds of the second gather, which may be among the ranks of a second copy alone (ZeRO-3's hpZ)."""
    size, layers = job.layout.secondary, max(stage.layers, 1)
    if not job.sharding.reshards:
        return 0
    if size == 1:
        live = job.live_elements / (job.shape.parameters / job.layout.tp) if job.stack == "deepspeed" else 0
        return (1 - live) * gathered
    near = axis_link(job, "dp", constants, size)
    volume = collectives.all_gather_volume(job.gather_bytes * sum(stage_parameters(job, stage)) / layers, size)
    return layers * collectives.seconds(volume, size, near)


def hidden_share(job: Job, constants: Profile) -> float:
    """Share of communication that computation can hide; on a CPU none, because Gloo needs the cores that compute."""
    return 0 if job.card.generation == "cpu" or not job.sharding.overlaps else constants.overlap


def _exposed(seconds: float, behind: float, share: float) -> float:
    """Seconds of communication that computation of `behind` seconds does not hide."""
    return max(seconds - share * behind, (1 - share) * seconds)


def data_collectives(job: Job, stage: Stage, constants: Profile) -> tuple[float, float]:
    """Return the seconds of data-parallel collectives: to gather a stage's weights once, and to reduce its gradients.

    ZeRO-3 gathers and scatters layer by layer, for each pass of each micro-batch.
    """
    layout = job.layout
    if layout.dp * layout.cp == 1:
        return 0, 0
    dense, experts = stage_parameters(job, stage)
    # experts travel in smaller groups, at most as slowly; those that no other rank has do not travel at all
    parameters = dense + (0 if layout.ep > 1 and layout.ep == _group_size(job) else experts)
    return (_of_shards if layout.zero == 3 else _of_replicas)(job, parameters, max(stage.layers, 1), constants)


def _group_size(job: Job) -> int:
    """Return the ranks that gather and reduce together."""
    return max(job.layout.shard, 1) if job.layout.zero == 3 else job.layout.dp * job.layout.cp


def _of_shards(job: Job, parameters: float, layers: float, constants: Profile) -> tuple[float, float]:
    layout, size = job.layout, _group_size(job)
    # the ranks of dp and cp are one group; cp varies faster, so that its stride is the group's
    stride = layout.stride("dp") // layout.cp
    over = group_link(job, size, stride, constants)
    # FSDP's calls are of a layer; DeepSpeed's may be of several, which it gathers ahead or reduces in one bucket
    ahead, bucket = job.sharding.prefetched, job.sharding.bucket_bytes / job.reduce_bytes
    own = parameters / layers
    units = (max(own, ahead), max(own, bucket)) if job.stack == "deepspeed" else (own, own)
    gathered, reduced = (
        collectives.seconds(collectives.one_way_volume(width * parameters, size, over), size, over, width * unit)
        for width, unit in zip((job.gather_bytes, job.reduce_bytes), units, strict=True)
    )
    copies = layout.dp * layout.cp // size
    if copies > 1:  # HSDP: a shard is also summed over its copies
        across = group_link(job, copies, stride * size, constants)
        volume = collectives.all_reduce_volume(job.reduce_bytes * parameters / size, copies)
        reduced += collectives.seconds(volume, copies, across, job.reduce_bytes * own / size)
    return gathered, reduced


def _of_replicas(job: Job, parameters: float, layers: float, constants: Profile) -> tuple[float, float]:
    layout, states, size = job.layout, job.states, _group_size(job)
    over = group_link(job, size, layout.stride("dp") // layout.cp, constants)
    weight_bytes, gradient_bytes = min(states.weights, job.element_bytes), states.accumulators or states.gradients
    bucket = _BUCKET_BYTES if layout.zero < 2 else gradient_bytes * parameters / layers
    bucket = max(bucket, job.sharding.bucket_bytes)
    summed = parameters * gradient_bytes
    # DeepSpeed all-reduces whole gradients under ZeRO-1 and 2, where the textbook has a reduce-scatter (ledger.py)
    whole = not layout.zero or job.stack == "deepspeed"
    volume = collectives.all_reduce_volume(summed, size) if whole else collectives.one_way_volume(summed, size, over)
    weights = collectives.one_way_volume(parameters * weight_bytes, size, over) if layout.zero else 0.0
    reduced, gathered = (collectives.seconds(each, size, over, bucket) for each in (volume, weights))
    return gathered, reduced


def reduces_each_micro_batch(job: Job) -> bool:
    """Whether gradients are reduced for each micro-batch: DeepSpeed's ZeRO-2 keeps shards only, nanotron just does."""
    kept = job.layout.zero == 2 and job.stack == "deepspeed"
    return kept or syncs_every_micro_batch(job.stack, job.layout.zero, job.layout.pp > 1)
