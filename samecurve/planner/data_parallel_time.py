"""Seconds that data-parallel ranks spend to gather weights and to reduce gradients, and what of it is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from samecurve.planner import links
from samecurve.planner.hardware import Profile, syncs_every_micro_batch
from samecurve.planner.job import Job, axis_link, group_link
from samecurve.planner.kernels import Seconds
from samecurve.planner.links import Link
from samecurve.planner.stages import Stage, stage_parameters

_BUCKET_BYTES = 25e6  # of DDP's gradient buckets, torch's default


@dataclass(frozen=True)
class Transfer:
    """The collectives of one kind that a stage needs for one pass.

    Attributes:
        content: what travels, and by which collective.
        width: bytes of an element.
        volume_bytes: that a rank sends.
        ranks: of the group.
        over: their link.
    """

    content: str
    width: float
    volume_bytes: float
    ranks: int
    over: Link
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """Collectives that run beside one computation.

    Attributes:
        when: the micro-batches in which they do: each one, the last one (once per step) or all others.
        computation: its name; "" where nothing is computed at that time.
        behind: its seconds.
        share: of them that can hide communication.
    """

    when: Literal["each", "last", "others"]
    transfers: Sequence[Transfer]
    computation: str
    behind: float
    share: float

    @property
    def seconds(self) -> float:
        return sum(transfer.seconds for transfer in self.transfers)

    @property
    def exposed(self) -> float:
        """Seconds of one time that the computation does not hide."""
        return max(self.seconds - self.share * self.behind, (1 - self.share) * self.seconds)

    def times(self, micro_batches: int) -> int:
        """Return how often they run in a step."""
        return {"each": micro_batches, "last": 1, "others": micro_batches - 1}[self.when]


def data_seconds(job: Job, stage: Stage, constants: Profile, one: Seconds) -> tuple[float, float]:
    """Return the exposed seconds of data-parallel communication (per micro-batch, per step).

    Args:
        job: strategy, batch and machines.
        stage: the part of the model that the rank holds.
        one: seconds of one layer's forward and backward, behind which communication may hide.
    """
    groups = overlapped(job, stage, constants, one)
    exposed = {
        when: sum(group.exposed for group in groups if group.when == when) for when in ("each", "last", "others")
    }
    return exposed["each"] + exposed["others"], exposed["last"] - exposed["others"]


def overlapped(job: Job, stage: Stage, constants: Profile, one: Seconds) -> list[Overlap]:
    """List the data-parallel collectives of a stage by the computation that they run beside.

    Args:
        job, stage, constants, one: see `data_seconds`.
    """
    gathers, reduces = transfers(job, stage, constants)
    # on a CPU none is hidden, because Gloo needs the cores that compute
    share = 0 if job.card.generation == "cpu" or not job.sharding.overlaps else constants.overlap
    layers = stage.layers
    backward = ("backward pass", layers * one.backward, share)
    alone = ("", 0.0, 0.0)
    if job.sharding.gathers_once:
        return [Overlap("last", gathers, *alone), Overlap("last", reduces, *backward)]
    if job.zero == 3:  # of each layer, hidden behind the layer before
        again = gathered_again(job, stage, gathers, constants)
        forward = Overlap("each", gathers, "forward pass", layers * one.forward, share)
        if not job.sharding.reduces_once:
            return [forward, Overlap("each", [*again, *reduces], *backward)]
        return [forward, Overlap("others", again, *backward), Overlap("last", [*again, *reduces], *backward)]
    if syncs_every_micro_batch(job.stack, job.zero, job.dims.pp > 1):
        # not hidden: published runs of this kind take 3 to 30 times as long
        return [Overlap("each", reduces, *alone)]
    if job.zero == 2 and job.stack == "deepspeed":  # which keeps shards of gradients only
        return [Overlap("each", reduces, *backward), Overlap("last", gathers, *alone)]
    if job.stack == "deepspeed":  # gathers what it has updated before the next step
        return [Overlap("last", reduces, *backward), Overlap("last", gathers, *alone)]
    return [Overlap("last", [*reduces, *gathers], *backward)]


def gathered_again(job: Job, stage: Stage, gathers: Sequence[Transfer], constants: Profile) -> list[Transfer]:
    """Return the second gather of a micro-batch, which may be among the ranks of a second copy alone (ZeRO-3's hpZ).

    There is none where all weights stay.
    """
    size, layers = job.strategy.secondary_partition, max(stage.layers, 1)
    if not job.sharding.reshards or not gathers:
        return []
    (first,) = gathers
    content = "gather of weights, again"
    if size == 1:
        live = job.live_elements / (job.shape.parameters / job.dims.tp) if job.stack == "deepspeed" else 0
        if live == 1:
            return []
        volume, seconds = (1 - live) * first.volume_bytes, (1 - live) * first.seconds
        return [Transfer(content, first.width, volume, first.ranks, first.over, seconds)]
    near = axis_link(job, "dp", constants, size)
    volume = links.all_gather_volume(job.gather_bytes * sum(stage_parameters(job, stage)) / layers, size)
    seconds = layers * links.collective_seconds(volume, size, near)
    return [Transfer(content, first.width, layers * volume, size, near, seconds)]


def transfers(job: Job, stage: Stage, constants: Profile) -> tuple[list[Transfer], list[Transfer]]:
    """Return the data-parallel collectives: those that gather a stage's weights once, and those of its gradients.

    ZeRO-3 gathers and scatters layer by layer, for each pass of each micro-batch.
    """
    dims = job.dims
    if dims.dp * dims.cp == 1:
        return [], []
    dense, experts = stage_parameters(job, stage)
    # experts travel in smaller groups, at most as slowly; those that no other rank has do not travel at all
    parameters = dense + (0 if dims.ep > 1 and dims.ep == _group_size(job) else experts)
    return (_of_shards if job.zero == 3 else _of_replicas)(job, parameters, max(stage.layers, 1), constants)


def _group_size(job: Job) -> int:
    """Return the ranks that gather and reduce together."""
    return max(job.shard, 1) if job.zero == 3 else job.dims.dp * job.dims.cp


def _of_shards(job: Job, parameters: float, layers: float, constants: Profile) -> tuple[list[Transfer], list[Transfer]]:
    dims, size = job.dims, _group_size(job)
    # the ranks of dp and cp are one group; cp varies faster, so that its stride is the group's
    stride = dims.tp
    over = group_link(job, size, stride, constants)
    # FSDP's calls are of a layer; DeepSpeed's may be of several, which it gathers ahead or reduces in one bucket
    ahead, bucket = job.sharding.prefetched, job.sharding.bucket_bytes / job.reduce_bytes
    own = parameters / layers
    units = (max(own, ahead), max(own, bucket)) if job.stack == "deepspeed" else (own, own)

    def one_way(content: str, width: float, unit: float) -> Transfer:
        volume = links.one_way_volume(width * parameters, size, over)
        return Transfer(content, width, volume, size, over, links.collective_seconds(volume, size, over, width * unit))

    gathered = one_way("gather of weights", job.gather_bytes, units[0])
    reduced = [one_way("reduce-scatter of gradients", job.reduce_bytes, units[1])]
    copies = dims.dp * dims.cp // size
    if copies > 1:  # HSDP: a shard is also summed over its copies
        across = group_link(job, copies, stride * size, constants)
        volume = links.all_reduce_volume(job.reduce_bytes * parameters / size, copies)
        seconds = links.collective_seconds(volume, copies, across, job.reduce_bytes * own / size)
        name = "all-reduce of shards over replicas"
        reduced.append(Transfer(name, job.reduce_bytes, volume, copies, across, seconds))
    return [gathered], reduced


def _of_replicas(
    job: Job, parameters: float, layers: float, constants: Profile
) -> tuple[list[Transfer], list[Transfer]]:
    dims, states, size = job.dims, job.states, _group_size(job)
    over = group_link(job, size, dims.tp, constants)
    weight_bytes, gradient_bytes = min(states.weights, job.element_bytes), states.accumulators or states.gradients
    bucket = _BUCKET_BYTES if job.zero < 2 else gradient_bytes * parameters / layers
    bucket = max(bucket, job.sharding.bucket_bytes)
    summed = parameters * gradient_bytes

    def transfer(content: str, width: float, volume: float) -> Transfer:
        return Transfer(content, width, volume, size, over, links.collective_seconds(volume, size, over, bucket))

    # DeepSpeed all-reduces whole gradients under ZeRO-1 and 2, where the textbook has a reduce-scatter (ledger.py)
    if not job.zero or job.stack == "deepspeed":
        reduced = transfer("all-reduce of gradients", gradient_bytes, links.all_reduce_volume(summed, size))
    else:
        volume = links.one_way_volume(summed, size, over)
        reduced = transfer("reduce-scatter of gradients", gradient_bytes, volume)
    if not job.zero:
        return [], [reduced]
    volume = links.one_way_volume(parameters * weight_bytes, size, over)
    return [transfer("gather of updated weights", weight_bytes, volume)], [reduced]
