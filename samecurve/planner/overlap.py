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
from samecurve.planner.data_parallel_time import Overlap, Transfer, overlapped
from samecurve.planner.hardware import BY_COST, Profile, profile
from samecurve.planner.job import Job, axis_link
from samecurve.planner.stages import Stage, stages
from samecurve.planner.step_time import StepTime
from samecurve.specs.gpus import GIB
from samecurve.strategy.timetables import SCHEDULES

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


def ratios(job: Job) -> list[Ratio]:
    """List every exchange of the slowest stage's ranks that the step time counts."""
    constants = profile(job.stack)
    whole = step_time.breakdown(job, constants)
    classes = stages(job, job.stack in BY_COST)
    stage = next(kind for kind in classes if step_time.stage_time(job, kind, constants) == replace(whole, bubble=0))
    exchanges = _Exchanges(job, stage, constants, whole)
    listed = [*exchanges.data_parallel()]
    listed += exchanges.tensor_parallel() if job.dims.tp > 1 else []
    listed += [exchanges.ring() if job.exchange == "ring" else exchanges.context_parallel()] if job.exchange else []
    listed += [exchanges.expert_parallel()] if job.dims.ep > 1 else []
    return listed + ([exchanges.pipeline()] if job.dims.pp > 1 else [])


def flops_rate(job: Job) -> float:
    """Return the FLOP/s of the GPU's best measured product in the job's precision."""
    tflops = {"fp32": job.card.fp32_tflops, "fp8": job.card.fp8_tflops}.get(job.precision) or job.card.matmul_tflops
    return tflops * 1e12


class _Exchanges:
    """Compares the exchanges of one stage with its computation."""

    def __init__(self, job: Job, stage: Stage, constants: Profile, whole: StepTime):
        self.job, self.stage, self.constants, self.whole = job, stage, constants, whole
        self.layer = kernels.layer(job, constants)
        self.layers_per_step = job.grad_accum * stage.layers

    def learnt(self, part: str) -> float:
        return self.job.calibration.time_factor(part, self.job.library) if self.job.calibration else 1.0

    def rates(self, sent: Transfer) -> tuple[float, float, float]:
        """Return the last arguments of the textbook's ratios: F, B and e."""
        return flops_rate(self.job), sent.over.bus_gb_per_s * 1e9, sent.width

    def inputs(self, sent: Transfer, times: str, behind: str, formula: str) -> str:
        flops, bandwidth, _ = self.rates(sent)
        return (
            f"{sent.volume_bytes / GIB:.3g} GiB {times} at {sent.volume_bytes / sent.seconds / 1e9:.3g} GB/s, "
            f"e={sent.width:g}, n={sent.ranks} over the {sent.over.level}, {behind}; {formula}, "
            f"F={flops / 1e12:.4g} TFLOP/s, B={bandwidth / 1e9:.3g} GB/s"
        )

    def in_layers(self, part: str, sent: Transfer, computation: float, behind: str, formula: str) -> Ratio:
        """Compare an exchange of each layer with the computation beside it, or which waits for it."""
        seconds = self.learnt(part) * self.layers_per_step * sent.seconds
        inputs, value = self.inputs(sent, "a layer", behind, formula), sent.seconds / computation
        return Ratio(sent.content, part, value, seconds, getattr(self.whole, part), False, inputs)

    def data_parallel(self) -> Iterator[Ratio]:
        job, factor = self.job, self.learnt("data_parallel")
        for group in overlapped(job, self.stage, self.constants, self.layer):
            times = group.times(job.grad_accum)
            if not times or not group.seconds:
                continue
            # where nothing is computed meanwhile, the ratio is that to the backward pass
            value = group.seconds / (group.behind or self.stage.layers * self.layer.backward)
            for sent in group.transfers:
                seconds = factor * times * sent.seconds
                behind = f"{sent.seconds:.3g} s with nothing beside"
                if group.behind:
                    together = f" ({group.seconds:.3g} s together)" if len(group.transfers) > 1 else ""
                    relation = "beside" if group.share else "after"
                    behind = f"{sent.seconds:.3g} s{together} {relation} {group.behind:.3g} s of {group.computation}"
                inputs = self.inputs(sent, f"x {times} a step", behind, self.data_formula(sent, group))
                exposed, overlaps = seconds * group.exposed / group.seconds, group.share > 0 and group.behind > 0
                yield Ratio(
                    f"data parallel, {sent.content}", "data_parallel", value, seconds, exposed, overlaps, inputs
                )  # fmt: skip

    def data_formula(self, sent: Transfer, group: Overlap) -> str:
        """Give the textbook's ratio to the 2 T P FLOPs of a forward pass, or to the 4 T P of a backward pass."""
        job, once = self.job, group.when == "last"
        tokens, name = (job.tokens * job.grad_accum, "T") if once else (job.tokens, "s b")
        ratio = textbook_data_parallel(tokens, sent.ranks, *self.rates(sent))
        if sent.content == "all-reduce of gradients" or group.computation == "forward pass":
            return f"e (n - 1) / n F / (2 {name} B) = {ratio:.3g}"
        if "replicas" in sent.content:  # both ways, of one shard
            return f"e (n - 1) / n F / (2 {name} B x shards) = {ratio / job.shard:.3g}"
        return f"e (n - 1) / n F / (4 {name} B) = {ratio / 2:.3g}"

    def tensor_parallel(self) -> list[Ratio]:
        """List the sums of hidden states; under sequence parallelism, each is a reduce-scatter and an all-gather."""
        job, size, over = self.job, self.job.dims.tp, axis_link(self.job, "tp", self.constants)
        calls = (2 if job.mlp_split == size else 1) * (3 if job.repeats_layers else 2)
        volume = links.all_reduce_volume(job.element_bytes * job.tokens * job.shape.hidden, size)
        seconds = step_time.tensor_seconds(replace(job, async_tp=False), self.constants)
        layer = self.layer.total
        behind = f"{layer:.3g} s of a layer {'run beside' if job.async_tp else 'wait'}"
        names = ["all-gather", "reduce-scatter"] if job.strategy.tp_sequence_parallel else ["all-reduce"]
        listed = []
        for name in names:
            content = f"tensor parallel, {name} of hidden states"
            sent = Transfer(
                content, job.element_bytes, calls * volume / len(names), size, over, seconds / len(names)
            )  # fmt: skip
            ratio = textbook_tensor_parallel(job.shape.hidden, size, *self.rates(sent))
            row = self.in_layers("tensor_parallel", sent, layer, behind, f"e (n - 1) F / (2 h B) = {ratio:.3g}")
            value, exposed = seconds / layer, row.exposed / len(names)
            listed.append(replace(row, value=value, exposed=exposed, overlaps=job.async_tp))
        return listed

    def context_parallel(self) -> Ratio:
        job, size, shape = self.job, self.job.dims.cp, self.job.shape
        width, by_heads = shape.attention_width / job.dims.tp, job.exchange == "ulysses"
        per_token = 2 * width * (1 + shape.kv_share) / size if by_heads else 2 * width * shape.kv_share
        name = "queries, keys, values and outputs (Ulysses)" if by_heads else "gathered keys and values"
        calls, seconds = 3 if job.repeats_layers else 2, step_time.context_seconds(job, self.constants)
        sent = self.to_each_rank(f"context parallel, {name}", "cp", size, calls * per_token, seconds)
        return self.waited_for("context_parallel", sent, per_token)

    def expert_parallel(self) -> Ratio:
        """Compare dispatch and combine, forward and backward, of `top_k` copies of each token."""
        job, size = self.job, self.job.dims.ep
        copies = job.shape.top_k * job.shape.hidden / job.mlp_split / size
        calls, seconds = 6 if job.repeats_layers else 4, step_time.expert_seconds(job, self.constants)
        sent = self.to_each_rank("expert parallel, dispatch and combine", "dp", size, calls * copies, seconds)
        return self.waited_for("expert_parallel", sent, 2 * copies)

    def to_each_rank(self, content: str, axis: str, ranks: int, elements: float, seconds: float) -> Transfer:
        """Describe what a rank sends of each token to all others, so many elements to each."""
        job, over = self.job, axis_link(self.job, axis, self.constants, ranks)
        volume = job.element_bytes * job.tokens * elements * (ranks - 1)
        return Transfer(content, job.element_bytes, volume, ranks, over, seconds)

    def waited_for(self, part: str, sent: Transfer, per_token: float) -> Ratio:
        """Compare an exchange for which a layer waits with that layer. per_token: elements to each rank, one way."""
        weights, layer = self.job.shape.active_layer_parameters / self.job.dims.tp, self.layer.total
        ratio = textbook_exchanged_layer(per_token, weights, sent.ranks, *self.rates(sent))
        behind = f"{sent.seconds:.3g} s, for which {layer:.3g} s of a layer wait"
        return self.in_layers(part, sent, layer, behind, f"e w (n - 1) F / (2 P B) = {ratio:.3g}")

    def ring(self) -> Ratio:
        """Compare the sends of keys, values and their gradients with the attention to other blocks."""
        job, size, over = self.job, self.job.dims.cp, axis_link(self.job, "cp", self.constants)
        seconds, attention = step_time.ring_seconds(job, self.constants)
        content = "context parallel, keys and values around the ring"
        sent = Transfer(content, job.element_bytes, step_time.ring_sends(job)[1], size, over, seconds)
        ratio = textbook_ring(job.seq, size, job.shape.kv_share, *self.rates(sent))
        behind = f"{seconds:.3g} s beside {attention:.3g} s of attention to other blocks"
        row = self.in_layers("context_parallel", sent, attention, behind, f"e k n F / (s B) = {ratio:.3g}")
        return replace(row, overlaps=True)

    def pipeline(self) -> Ratio:
        """Compare the sends of hidden states and of their gradients with the next stage's forward pass."""
        job, layers = self.job, self.stage.layers / self.job.virtual_stages
        width = 4 if job.strategy.schedule in SCHEDULES else job.element_bytes
        over, seconds = axis_link(job, "pp", self.constants, 2), step_time.send_seconds(job, self.constants)
        content = "pipeline, hidden states and their gradients"
        sent = Transfer(content, width, width * job.tokens * job.shape.hidden / job.sequence_split, 2, over, seconds)
        ratio = textbook_pipeline(job.shape.hidden, max(layers, 1), *self.rates(sent))
        times, forward = 2 * job.virtual_stages * job.grad_accum, layers * self.layer.forward
        behind = f"{seconds:.3g} s, for which {forward:.3g} s of the next stage's forward pass wait"
        formula = f"e F / (32 h l B) = {ratio:.3g}, l={layers:g}"
        inputs, of_step = self.inputs(sent, f"x {times} a step", behind, formula), times * seconds
        return Ratio(
            content, "pipeline_sends", seconds / forward, self.learnt("pipeline_sends") * of_step,
            self.whole.pipeline_sends, False, inputs,
        )  # fmt: skip
