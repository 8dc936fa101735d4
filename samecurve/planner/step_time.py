"""Seconds of one optimizer step, by part. What is hidden behind computation is not counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from samecurve.planner import collectives, kernels, links, offload
from samecurve.planner.activations import expert_imbalance
from samecurve.planner.bubbles import idle_slots
from samecurve.planner.hardware import DEFAULT_NODE_GBIT, Link, link
from samecurve.planner.job import Job
from samecurve.planner.kernels import Seconds
from samecurve.planner.memory import shard_sizes, stage_parameters
from samecurve.planner.profiles import BY_COST, Profile, profile, syncs_every_micro_batch
from samecurve.planner.stages import Stage, stages

HIDDEN_TENSOR_PARALLEL = 0.5  # exposed share with overlapped products
BUCKET_BYTES = 25e6  # of DDP's gradient buckets, torch's default
SEND_SECONDS = 100e-6  # host time of one send to a neighbouring stage
COLLECTIVE_SECONDS = 20e-6  # host time of one collective inside a layer


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the slowest stage."""

    compute: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline_sends: float
    bubble: float
    data_parallel: float
    optimizer: float
    offload: float
    host: float

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def largest(self) -> str:
        """Name of the largest part beside the computation."""
        return max((each.name for each in fields(self)[1:]), key=lambda name: getattr(self, name))


def breakdown(job: Job, constants: Profile | None = None) -> StepTime:
    """Predict the step time of a job."""
    constants = constants or profile(job.stack)
    times = [stage_time(job, stage, constants) for stage in stages(job, job.stack in BY_COST)]
    return max(times, key=lambda time: time.total)


def _calibrated(time: StepTime, job: Job) -> StepTime:
    """Multiply each part by what runs on these machines say."""
    learnt = job.calibration
    if not learnt:
        return time
    return StepTime(**{part: value * learnt.time_factor(part, job.stack) for part, value in asdict(time).items()})


def stage_time(job: Job, stage: Stage, constants: Profile) -> StepTime:
    """Predict the step time of one stage's ranks."""
    layout, count = job.layout, job.grad_accum
    one = kernels.layer(job, constants)
    compute = stage.layers * one.total
    if stage.head:
        compute += kernels.head(job, constants).total
    tensor, context, expert = (
        stage.layers * part(job, constants) for part in (tensor_seconds, context_seconds, expert_seconds)
    )
    # what kernels and collectives leave of the floor is spent waiting for the slowest host
    waits = _floor(job, constants) - one.total - tensor / max(stage.layers, 1)
    tensor += stage.layers * max(0.0, waits)
    sends = pipeline_seconds(job, constants)
    gathered, reduced = data_seconds(job, stage, constants, one)
    slot = compute + tensor + context + expert + sends + gathered
    idle = idle_slots(layout.schedule, layout.pp, count, layout.virtual_stages) * slot
    dense, experts = stage_parameters(job, stage)
    ranks = shard_sizes(job) if layout.zero else (1, 1)
    update = kernels.optimizer(job, dense / ranks[0] + experts / ranks[1], constants)
    found = StepTime(
        compute=count * compute,
        tensor_parallel=count * tensor,
        context_parallel=count * context,
        expert_parallel=count * expert,
        pipeline_sends=count * sends,
        bubble=idle,
        data_parallel=count * gathered + reduced,
        optimizer=update,
        offload=offload.seconds(job, dense / ranks[0] + experts / ranks[1]),
        host=constants.step_us * 1e-6,
    )
    return _calibrated(found, job)


def _floor(job: Job, constants: Profile) -> float:
    """Least seconds of one layer's forward and backward in a tensor-parallel group."""
    size = job.layout.tp
    each = constants.rank_floor_us if job.layout.pp == 1 else constants.pipeline_rank_floor_us
    return 0 if size == 1 else size * each * 1e-6


def _link(job: Job, axis: str, constants: Profile) -> Link:
    """Find the link of one axis' groups."""
    return _link_of(job, getattr(job.layout, axis), job.layout.stride(axis), constants)


def axis_link(job: Job, axis: str, ranks: int, constants: Profile) -> Link:
    """Find the link of `ranks` neighbours along one axis."""
    return _link_of(job, ranks, job.layout.stride(axis), constants)


def strided_link(job: Job, ranks: int, stride: int, constants: Profile) -> Link:
    """Find the link of a group of ranks that are `stride` apart."""
    return _link_of(job, ranks, stride, constants)


def _link_of(job: Job, ranks: int, stride: int, constants: Profile) -> Link:
    if job.levels:
        step = constants.ring_step_us * 1e-6
        return links.link(job.levels, job.gpus_per_node, ranks, stride, constants.network_share, step)
    gbit = (job.node_gbit or DEFAULT_NODE_GBIT) * constants.network_share
    return link(job.card, job.gpus_per_node, gbit, ranks, stride, constants.ring_step_us * 1e-6)


def tensor_seconds(job: Job, constants: Profile) -> float:
    """Seconds of one layer's tensor-parallel collectives, forward and backward.

    Two all-reduces each way, of attention and MLP; with sequence parallelism each is a reduce-scatter and an
    all-gather. Full recomputation repeats the forward's.
    """
    size = job.layout.tp
    if size == 1:
        return 0
    over = _link(job, "tp", constants)
    hidden = job.element_bytes * job.tokens * job.shape.hidden
    volume = collectives.all_reduce_volume(hidden, size)
    call = collectives.seconds(volume, size, over, hidden)
    blocks = 2 if job.mlp_split == size else 1
    calls = blocks * (3 if job.checkpointing == "full" else 2)
    shown = HIDDEN_TENSOR_PARALLEL if job.async_tp else 1
    return calls * (call * shown + COLLECTIVE_SECONDS)


def context_seconds(job: Job, constants: Profile) -> float:
    """Exposed seconds of the exchange of keys in one layer.

    Around a ring: n - 1 sends of keys and values forward, twice that backward. Gathered keys travel once each way, not
    hidden; so do queries, keys, values and outputs under Ulysses, of which a rank keeps 1 / n.
    """
    size = job.layout.cp
    if size == 1:
        return 0
    over = _link(job, "cp", constants)
    sent = job.element_bytes * job.tokens * 2 * job.shape.attention_width * job.shape.kv_share / job.layout.tp
    if job.layout.exchange != "ring":
        by_heads = job.layout.exchange == "ulysses"
        # `sent` is keys and values, sent / kv_share queries and outputs
        volume = (size - 1) * (sent / job.shape.kv_share * (1 + job.shape.kv_share) / size if by_heads else sent)
        passes = 3 if job.checkpointing == "full" else 2
        calls = 2 if by_heads else 1
        waits = calls * (over.step_seconds * (size - 1) + COLLECTIVE_SECONDS)
        return passes * (volume / (over.bus_gb_per_s * 1e9) + waits)
    steps = 3 * (size - 1)
    communication = steps * (sent / (over.bus_gb_per_s * 1e9) + over.step_seconds)
    # attention forward and backward (1 + 2.5), with half of its 4 s a FLOPs under the causal mask
    flops = (1 + kernels.BACKWARD_ATTENTION) * 2 * job.tokens * job.seq * job.shape.attention_width / job.layout.tp
    hidden = flops / kernels.fused_attention_rate(job, constants)
    return max(0.0, communication - hidden * (size - 1) / size) + steps * COLLECTIVE_SECONDS


def expert_seconds(job: Job, constants: Profile) -> float:
    """Seconds of dispatch and combine in one layer: two all-to-alls of top_k copies each pass, and once more in full
    recomputation.
    """
    size = job.layout.ep
    if size == 1 or not job.shape.experts:
        return 0
    over = _link_of(job, size, job.layout.stride("dp"), constants)
    volume = job.element_bytes * job.tokens * job.shape.top_k * job.shape.hidden * (size - 1) / size / job.mlp_split
    calls = 6 if job.checkpointing == "full" else 4
    return calls * expert_imbalance(job) * (volume / (over.bus_gb_per_s * 1e9) + over.step_seconds * (size - 1))


def pipeline_seconds(job: Job, constants: Profile) -> float:
    """Exposed seconds of one micro-batch's sends to the neighbouring stages: forward and backward, v times."""
    layout = job.layout
    return 0 if layout.pp == 1 else layout.virtual_stages * 2 * send_seconds(job, constants)


def send_seconds(job: Job, constants: Profile) -> float:
    """Seconds of one message between neighbouring stages: s b h."""
    layout = job.layout
    over = _link_of(job, 2, layout.stride("pp"), constants)
    sent = job.element_bytes * job.tokens * job.shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    return sent / (over.bus_gb_per_s * 1e9) + SEND_SECONDS


def data_seconds(job: Job, stage: Stage, constants: Profile, one: Seconds) -> tuple[float, float]:
    """Return the exposed seconds of data-parallel communication (per micro-batch, per step)."""
    gathered, reduced = data_collectives(job, stage, constants)
    share = hidden_share(job, constants)
    if job.layout.zero == 3:  # of each layer, hidden behind the layer before
        layers = max(stage.layers, 1)
        backward = _exposed(_gathered_again(job, stage, gathered, constants) + reduced, layers * one.backward, share)
        return _exposed(gathered, layers * one.forward, share) + backward, 0
    behind = stage.layers * one.backward
    if syncs_every_micro_batch(job.stack, job.layout.zero, job.layout.pp > 1):
        # not hidden: published runs of this kind take 3 to 30 times as long
        return reduced, 0
    if reduces_each_micro_batch(job):
        return _exposed(reduced, behind, share), gathered
    return 0, _exposed(reduced + gathered, behind, share)


def _gathered_again(job: Job, stage: Stage, gathered: float, constants: Profile) -> float:
    """Return the seconds of ZeRO-3's second gather, which may be among the ranks of a second copy alone (hpZ)."""
    size, layers = job.layout.secondary, max(stage.layers, 1)
    if size == 1:
        return gathered
    near = _link_of(job, size, job.layout.stride("dp"), constants)
    volume = collectives.all_gather_volume(job.element_bytes * sum(stage_parameters(job, stage)) / layers, size)
    return layers * collectives.seconds(volume, size, near)


def hidden_share(job: Job, constants: Profile) -> float:
    """Share of communication that computation can hide; on a CPU none, because Gloo needs the cores that compute."""
    return 0 if job.card.generation == "cpu" else constants.overlap


def _exposed(seconds: float, behind: float, share: float) -> float:
    """Seconds of communication that computation of `behind` seconds does not hide."""
    return max(seconds - share * behind, (1 - share) * seconds)


def data_collectives(job: Job, stage: Stage, constants: Profile) -> tuple[float, float]:
    """Return the seconds of data-parallel collectives: to gather a stage's weights once, and to reduce its gradients.

    ZeRO-3 gathers and scatters layer by layer, for each pass of each micro-batch.
    """
    layout, states = job.layout, job.states
    sharded = layout.zero == 3
    size = max(layout.shard, 1) if sharded else layout.dp * layout.cp
    if layout.dp * layout.cp == 1:
        return 0, 0
    # the ranks of dp and cp are one group; cp varies faster, so that its stride is the group's
    over = _link_of(job, size, layout.stride("dp") // layout.cp, constants)
    dense, experts = stage_parameters(job, stage)
    # experts travel in smaller groups, at most as slowly; those that no other rank has do not travel at all
    parameters = dense + (0 if layout.ep > 1 and size == layout.ep else experts)
    layers = max(stage.layers, 1)
    if sharded:
        volume = collectives.all_gather_volume(job.element_bytes * parameters / layers, size)
        call = layers * collectives.seconds(volume, size, over)
        return call, call
    weight_bytes, gradient_bytes = min(states.weights, job.element_bytes), states.accumulators or states.gradients
    bucket = BUCKET_BYTES if layout.zero < 2 else gradient_bytes * parameters / layers
    summed = parameters * gradient_bytes
    # DeepSpeed all-reduces whole gradients under ZeRO-1 and 2, where the textbook has a reduce-scatter (ledger.py)
    whole = not layout.zero or job.stack == "deepspeed"
    volume = collectives.all_reduce_volume(summed, size) if whole else collectives.all_gather_volume(summed, size)
    weights = collectives.all_gather_volume(parameters * weight_bytes, size) if layout.zero else 0.0
    reduced, gathered = (collectives.seconds(each, size, over, bucket) for each in (volume, weights))
    return gathered, reduced


def reduces_each_micro_batch(job: Job) -> bool:
    """Whether gradients are reduced for each micro-batch: DeepSpeed's ZeRO-2 keeps shards only, nanotron just does."""
    kept = job.layout.zero == 2 and job.stack == "deepspeed"
    return kept or syncs_every_micro_batch(job.stack, job.layout.zero, job.layout.pp > 1)
