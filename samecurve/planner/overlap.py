"""`plan --overlap`: each exchange of a job beside the computation that can hide it, with inputs and verdict.

A ratio compares seconds of the step's formulas: those of the exchange with the links' attained rates, and those of the
computation beside it. The exposed seconds of an axis add up to its part of the step time. The inputs end with the
textbook's ratio of the same sizes, which knows neither latencies nor what a product attains; communication is hidden
where it is at most 1. The ultra-scale playbook's appendix gives these ratios with three errors, corrected here:

- Its data-parallel ratio keeps a factor of the number of parameters P. P cancels: 2 P (n - 1) / (n B) of communication
  over 4 T P / F of backward pass.
- What it calls bytes are elements. `element_bytes` stands in each ratio here.
- It counts Adam's states of a block as 6 h^2 of 2 bytes for 3 h^2 fp32 elements: 12 bytes per parameter.

F: FLOP/s of a GPU. B: bus bandwidth in bytes/s. n: ranks of the group. e: bytes of an element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from samecurve.planner import kernels, links, step_time
from samecurve.planner.data_parallel_time import Beside, Transfer, beside
from samecurve.planner.hardware import BY_COST, Profile, profile
from samecurve.planner.job import Job, axis_link
from samecurve.planner.links import Link
from samecurve.planner.stages import Stage, stages
from samecurve.planner.step_time import StepTime
from samecurve.specs.gpus import GIB
from samecurve.strategy.pipeline_schedules import SCHEDULES

BLOCK_GATED = 16  # weights of a block in units of h^2, with ffn = 4 h


def textbook_data_parallel(
    tokens: float, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2
) -> float:
    """Return e (n - 1) / n F / (2 T B), with T tokens of a rank.

    It is that of a gradient's all-reduce to the step's backward pass, and that of gathering a block's weights to the
    forward pass of the block before, with T of a micro-batch.
    """
    return element_bytes * (ranks - 1) / ranks * flops / (2 * tokens * bandwidth)


def textbook_tensor_parallel(
    hidden: int, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2
) -> float:
    """Return that of gathering the input of a linear layer with h outputs to its product: e (n - 1) F / (2 h B)."""
    return element_bytes * (ranks - 1) * flops / (2 * hidden * bandwidth)


def textbook_pipeline(hidden: int, layers: float, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Return that of sending h elements to the forward pass of the next stage's l gated blocks: e F / (32 h l B)."""
    return element_bytes * flops / (2 * BLOCK_GATED * hidden * layers * bandwidth)


def textbook_ring(
    seq: float, ranks: int, kv_share: float, flops: float, bandwidth: float, element_bytes: float = 2
) -> float:
    """Return that of sending a block of keys and values to attention to the one before: e k n F / (s B).

    A block of s / n tokens of a row of s has 2 e k d bytes of each, k being key heads by query heads, and d s / n
    queries on it take 2 d (s / n)^2 FLOPs under the causal mask, which leaves half of 4.
    """
    return element_bytes * kv_share * ranks * flops / (seq * bandwidth)


def textbook_exchanged_layer(
    width: float, weights: float, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2
) -> float:
    """Return that of sending w elements per token to each other rank to a layer's products: e w (n - 1) F / (2 P B).

    A token meets P weights on a rank. Gathered keys and values have w = 2 k d. Queries, keys, values and outputs of
    Ulysses are 2 (1 + k) d, of which each rank keeps 1 / n: w = 2 (1 + k) d / n. Dispatch and combine of experts:
    w = 2 K h / n.
    """
    return element_bytes * width * (ranks - 1) * flops / (2 * weights * bandwidth)


@dataclass(frozen=True)
class Ratio:
    """One kind of exchange of a job.

    Attributes:
        axis: the dimension that exchanges, and what.
        part: the field of StepTime that counts it.
        value: seconds of all that runs beside one computation, by the seconds of this computation.
        seconds: of the exchange in a step.
        exposed: seconds that it adds to the step. Where it is hidden, a share still is, because it slows the
            computation down.
        overlaps: whether it runs beside the computation at all.
        inputs: the numbers that went in.
    """

    axis: str
    part: str
    value: float
    seconds: float
    exposed: float
    overlaps: bool
    inputs: str

    @property
    def verdict(self) -> str:
        name = ("hidden" if self.value <= 1 else "exposed") if self.overlaps else "not overlapped"
        return f"{name}, adds {self.exposed:.3g} of {self.seconds:.3g} s"


@dataclass(frozen=True)
class Sent:
    """What a rank sends at one time: bytes, those of an element, to how many ranks over which link, and seconds."""

    num_bytes: float
    width: float
    ranks: int
    over: Link
    seconds: float

    def rates(self, job: Job) -> tuple[float, float, float]:
        """Return the last arguments of the textbook's ratios: F, B and e."""
        return flops_rate(job), self.over.bus_gb_per_s * 1e9, self.width

    def inputs(self, job: Job, times: str, behind: str, formula: str) -> str:
        flops, bandwidth, _ = self.rates(job)
        attained = self.num_bytes / self.seconds / 1e9
        return (
            f"{self.num_bytes / GIB:.3g} GiB {times} at {attained:.3g} GB/s, e={self.width:g}, n={self.ranks} "
            f"over the {self.over.level}, "
            f"{behind}; {formula}, F={flops / 1e12:.4g} TFLOP/s, B={bandwidth / 1e9:.3g} GB/s"
        )


def ratios(job: Job, constants: Profile | None = None) -> list[Ratio]:
    """List every exchange of the slowest stage's ranks that the step time counts."""
    constants = constants or profile(job.stack)
    whole = step_time.breakdown(job, constants)
    classes = stages(job, job.stack in BY_COST)
    stage = next(kind for kind in classes if step_time.stage_time(job, kind, constants) == replace(whole, bubble=0))
    inner = {"tp": _tensor_parallel, "cp": _context_parallel, "ep": _expert_parallel, "pp": _pipeline}
    exchanges = [*_data_parallel(job, stage, constants)]
    for axis, describe in inner.items():
        if getattr(job.dims, axis) > 1:
            exchanges += describe(job, stage, constants, whole)
    return exchanges


def flops_rate(job: Job) -> float:
    """Return the FLOP/s of the GPU's best measured product in the job's precision."""
    tflops = {"fp32": job.card.fp32_tflops, "fp8": job.card.fp8_tflops}.get(job.precision) or job.card.matmul_tflops
    return tflops * 1e12


def _learnt(job: Job, part: str) -> float:
    return job.calibration.time_factor(part, job.library) if job.calibration else 1.0


def _data_parallel(job: Job, stage: Stage, constants: Profile) -> Iterator[Ratio]:
    one, learnt = kernels.layer(job, constants), _learnt(job, "data_parallel")
    for group in beside(job, stage, constants, one):
        times = group.times(job.grad_accum)
        if not times or not group.seconds:
            continue
        for transfer in group.transfers:
            seconds = learnt * times * transfer.seconds
            sent = Sent(transfer.volume_bytes, transfer.width, transfer.ranks, transfer.over, transfer.seconds)
            yield Ratio(
                f"data parallel, {transfer.content}",
                "data_parallel",
                # where nothing is computed meanwhile, the ratio is that to the backward pass
                group.seconds / (group.behind or stage.layers * one.backward),
                seconds,
                seconds * group.exposed / group.seconds,
                group.share > 0 and group.behind > 0,
                sent.inputs(
                    job, f"x {times} a step", _described(group, transfer), _data_formula(job, sent, transfer, group)
                ),
            )


def _described(group: Beside, transfer: Transfer) -> str:
    if not group.behind:
        return f"{transfer.seconds:.3g} s with nothing beside"
    together = f" ({group.seconds:.3g} s together)" if len(group.transfers) > 1 else ""
    relation = "beside" if group.share else "after"
    return f"{transfer.seconds:.3g} s{together} {relation} {group.behind:.3g} s of {group.computation}"


def _data_formula(job: Job, sent: Sent, transfer: Transfer, group: Beside) -> str:
    """Give the textbook's ratio to the 2 T P FLOPs of a forward pass, or to the 4 T P of a backward pass."""
    rates, once = sent.rates(job), group.when == "last"
    tokens, name = (job.tokens * job.grad_accum, "T") if once else (job.tokens, "s b")
    one_way = textbook_data_parallel(tokens, sent.ranks, *rates)
    if transfer.content == "all-reduce of gradients":
        return f"e (n - 1) / n F / (2 {name} B) = {textbook_data_parallel(tokens, sent.ranks, *rates):.3g}"
    if group.computation == "forward pass":
        return f"e (n - 1) / n F / (2 {name} B) = {one_way:.3g}"
    if "replicas" in transfer.content:  # both ways, of one shard
        return f"e (n - 1) / n F / (2 {name} B x shards) = {one_way / max(job.shard, 1):.3g}"
    return f"e (n - 1) / n F / (4 {name} B) = {one_way / 2:.3g}"


def _tensor_parallel(job: Job, stage: Stage, constants: Profile, whole: StepTime) -> list[Ratio]:
    """List the sums of hidden states; under sequence parallelism, each is a reduce-scatter and an all-gather."""
    size, over = job.dims.tp, axis_link(job, "tp", constants)
    scale = _learnt(job, "tensor_parallel") * job.grad_accum * stage.layers
    calls = (2 if job.mlp_split == size else 1) * (3 if job.repeats_layers else 2)
    volume = links.all_reduce_volume(job.element_bytes * job.tokens * job.shape.hidden, size)
    seconds = step_time.tensor_seconds(replace(job, async_tp=False), constants)
    waits = whole.tensor_parallel - scale * step_time.tensor_seconds(job, constants)
    layer = kernels.layer(job, constants).total
    behind = f"{layer:.3g} s of a layer {'run beside' if job.async_tp else 'wait'}"
    behind += f", {waits:.3g} s a step for the slowest host" if waits > 1e-9 else ""
    names = ["all-gather", "reduce-scatter"] if job.strategy.tp_sequence_parallel else ["all-reduce"]
    sent = Sent(calls * volume / len(names), job.element_bytes, size, over, seconds / len(names))
    ratio = textbook_tensor_parallel(job.shape.hidden, size, *sent.rates(job))
    inputs = sent.inputs(job, "a layer", behind, f"e (n - 1) F / (2 h B) = {ratio:.3g}")
    return [
        Ratio(
            f"tensor parallel, {name} of hidden states",
            "tensor_parallel",
            seconds / layer,
            scale * seconds / len(names),
            whole.tensor_parallel / len(names),
            job.async_tp,
            inputs,
        )
        for name in names
    ]


def _context_parallel(job: Job, stage: Stage, constants: Profile, whole: StepTime) -> list[Ratio]:
    if job.exchange == "ring":
        return [_ring(job, stage, constants, whole)]
    size, over, shape = job.dims.cp, axis_link(job, "cp", constants), job.shape
    width, by_heads = shape.attention_width / job.dims.tp, job.exchange == "ulysses"
    per_token = 2 * width * (1 + shape.kv_share) / size if by_heads else 2 * width * shape.kv_share
    passes = 3 if job.repeats_layers else 2
    seconds, moved = step_time.context_seconds(job, constants), passes * job.element_bytes * job.tokens * per_token
    sent = Sent(moved * (size - 1), job.element_bytes, size, over, seconds)
    name = "queries, keys, values and outputs (Ulysses)" if by_heads else "gathered keys and values"
    weights = shape.active_layer_parameters / job.dims.tp
    exchange = f"context parallel, {name}", "context_parallel", seconds, whole.context_parallel
    return [_in_a_layer(job, stage, constants, sent, exchange, (per_token, weights))]


def _ring(job: Job, stage: Stage, constants: Profile, whole: StepTime) -> Ratio:
    """Compare the sends of keys, values and their gradients with the attention to other blocks."""
    size, over, shape = job.dims.cp, axis_link(job, "cp", constants), job.shape
    seconds, attention = step_time.ring_seconds(job, constants)
    sent = Sent(step_time.ring_sends(job)[1], job.element_bytes, size, over, seconds)
    behind = f"{seconds:.3g} s beside {attention:.3g} s of attention to other blocks"
    formula = f"e k n F / (s B) = {textbook_ring(job.seq, size, shape.kv_share, *sent.rates(job)):.3g}"
    return Ratio(
        "context parallel, keys and values around the ring",
        "context_parallel",
        seconds / attention,
        _learnt(job, "context_parallel") * job.grad_accum * stage.layers * seconds,
        whole.context_parallel,
        True,
        sent.inputs(job, "a layer", behind, formula),
    )


def _expert_parallel(job: Job, stage: Stage, constants: Profile, whole: StepTime) -> list[Ratio]:
    """List dispatch and combine, forward and backward, of `top_k` copies of each token."""
    size, over, shape = job.dims.ep, axis_link(job, "dp", constants, job.dims.ep), job.shape
    calls = 6 if job.repeats_layers else 4
    copies = shape.top_k * shape.hidden / job.mlp_split / size
    seconds, moved = step_time.expert_seconds(job, constants), calls * job.element_bytes * job.tokens * copies
    sent = Sent(moved * (size - 1), job.element_bytes, size, over, seconds)
    exchange = "expert parallel, dispatch and combine", "expert_parallel", seconds, whole.expert_parallel
    weights = shape.active_layer_parameters / job.dims.tp
    return [_in_a_layer(job, stage, constants, sent, exchange, (2 * copies, weights))]


def _in_a_layer(
    job: Job,
    stage: Stage,
    constants: Profile,
    sent: Sent,
    exchange: tuple[str, str, float, float],
    sizes: tuple[float, float],
) -> Ratio:
    """Compare an exchange for which a layer's computation waits with that computation.

    Args:
        exchange: its name, its part of the step, its seconds in a layer, and the seconds of that part.
        sizes: elements per token that a rank sends to each other one, and a layer's weights that a token meets.
    """
    name, part, seconds, exposed = exchange
    layer = kernels.layer(job, constants).total
    ratio = textbook_exchanged_layer(*sizes, sent.ranks, *sent.rates(job))
    scale = _learnt(job, part) * job.grad_accum * stage.layers
    behind = f"{seconds:.3g} s, for which {layer:.3g} s of a layer wait"
    inputs = sent.inputs(job, "a layer", behind, f"e w (n - 1) F / (2 P B) = {ratio:.3g}")
    return Ratio(name, part, seconds / layer, scale * seconds, exposed, False, inputs)


def _pipeline(job: Job, stage: Stage, constants: Profile, whole: StepTime) -> list[Ratio]:
    """List the sends of hidden states and of their gradients to the neighbouring stages."""
    over, layers = axis_link(job, "pp", constants, 2), stage.layers / job.virtual_stages
    width = 4 if job.strategy.schedule in SCHEDULES else job.element_bytes
    cut = job.dims.tp if job.strategy.tp_sequence_parallel else 1
    seconds, forward = step_time.send_seconds(job, constants), layers * kernels.layer(job, constants).forward
    sent = Sent(width * job.tokens * job.shape.hidden / cut, width, 2, over, seconds)
    ratio = textbook_pipeline(job.shape.hidden, max(layers, 1), *sent.rates(job))
    sends = 2 * job.virtual_stages * job.grad_accum
    behind = f"{seconds:.3g} s, for which {forward:.3g} s of the next stage's forward pass wait"
    name = "pipeline, hidden states and their gradients"
    inputs = sent.inputs(job, f"x {sends} a step", behind, f"e F / (32 h l B) = {ratio:.3g}, l={layers:g}")
    scale = _learnt(job, "pipeline_sends")
    return [
        Ratio(name, "pipeline_sends", seconds / forward, scale * sends * seconds, whole.pipeline_sends, False, inputs)
    ]
