"""Ratio of communication to the computation that can hide it, by axis; hidden where it is at most 1.

The ultra-scale playbook's appendix gives these ratios with three errors, which are corrected here:

- Its data-parallel ratio keeps a factor of the number of parameters P. P cancels: 2 P (n - 1) / (n B) of communication
  over 4 T P / F of backward pass.
- What it calls bytes are elements. `element_bytes` stands in each ratio here.
- It counts Adam's states of a block as 6 h^2 of 2 bytes for 3 h^2 fp32 elements: 12 bytes per parameter.

F: FLOP/s of a GPU. B: bus bandwidth in bytes/s. n: ranks of the group.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from samecurve.planner.collectives import all_gather_volume, all_reduce_volume
from samecurve.planner.group_links import axis_link
from samecurve.planner.job import Job
from samecurve.planner.profiles import Profile, profile

BLOCK_GATED, BLOCK_PLAIN = 16, 12  # weights of a block in units of h^2, with ffn = 4 h


def data_parallel(tokens: float, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Gradient all-reduce over backward pass: e (n - 1) / n F / (2 T B).

    Args:
        tokens: T, per rank and step.
        ranks: n, data-parallel.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of a gradient.
    """
    return element_bytes * (ranks - 1) / ranks * flops / (2 * tokens * bandwidth)


def bucket_seconds(bucket_bytes: float, ranks: int, bandwidth: float) -> float:
    """Seconds to reduce one bucket: 2 (n - 1) / n of its bytes over B."""
    return all_reduce_volume(bucket_bytes, ranks) / bandwidth


def fully_sharded(tokens: float, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Gathering the next block over this one's forward: e (n - 1) / n F / (2 s b B).

    Args:
        tokens: s b, per rank and micro-batch.
        ranks: n, among which weights are sharded.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of a weight.
    """
    return element_bytes * (ranks - 1) / ranks * flops / (2 * tokens * bandwidth)


def tensor_parallel(hidden: int, ranks: int, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Gathering the input of a linear layer over its product: e (t - 1) F / (2 h B).

    Args:
        hidden: h, outputs of the layer on all ranks together.
        ranks: t, tensor-parallel.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of an activation.
    """
    return element_bytes * (ranks - 1) * flops / (2 * hidden * bandwidth)


def pipeline(hidden: int, layers: int, flops: float, bandwidth: float, element_bytes: float = 2) -> float:
    """Sending the hidden state over the next stage's forward: e F / (32 h l B).

    Args:
        hidden: h, width of the hidden state.
        layers: l, gated blocks of a stage.
        flops: F, FLOP/s of a GPU.
        bandwidth: B, bus bandwidth in bytes/s.
        element_bytes: e, of an activation.
    """
    return element_bytes * flops / (2 * BLOCK_GATED * hidden * layers * bandwidth)


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block (gated, ffn = 4 h) in mixed precision: 16-bit weights and gradients, fp32 Adam."""

    weights: float
    gradients: float
    adam: float

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


def block_bytes(hidden: int, gated: bool = True) -> BlockBytes:
    parameters = (BLOCK_GATED if gated else BLOCK_PLAIN) * hidden**2
    return BlockBytes(2 * parameters, 2 * parameters, 12 * parameters)


def sharded_block_volume(hidden: int, ranks: int) -> float:
    """Elements of a gated block that a rank sends per micro-batch under ZeRO-3: two gathers and a reduce-scatter."""
    return 3 * all_gather_volume(BLOCK_GATED * hidden**2, ranks)


def utilization_tflops(
    parameters_b: float, seq: int, global_batch: int, seconds: float, gpus: int, per_parameter: int = 8
) -> float:
    """TFLOP/s of one GPU: 6 FLOPs per parameter and token, 8 with full recomputation.

    Args:
        parameters_b: parameters in 10^9.
        seq: tokens of a row.
        global_batch: rows of a step, over all GPUs.
        seconds: duration of a step.
        per_parameter: FLOPs per parameter and token.
    """
    return parameters_b * per_parameter * seq * global_batch / (seconds * gpus * 1e3)


@dataclass(frozen=True)
class Ratio:
    """One axis of a job: communication over the computation beside it, and the numbers that went in."""

    axis: str
    value: float
    inputs: str

    @property
    def verdict(self) -> str:
        return "hidden" if self.value <= 1 else "exposed"


def ratios(job: Job, constants: Profile | None = None) -> list[Ratio]:
    """Compute the ratio of every axis that the job uses, with the best measured FLOP/s and the attained bandwidth."""
    constants = constants or profile(job.stack)
    layout, flops, tokens = job.layout, job.card.matmul_tflops * 1e12, job.tokens
    found = []

    def add(axis: str, name: str, ranks: int, formula, *inputs: float) -> None:
        link = axis_link(job, axis, constants, ranks)
        value = formula(*inputs, flops, link.bus_gb_per_s * 1e9)
        shown = f"n={ranks}, F={flops / 1e12:.0f} TFLOP/s, B={link.bus_gb_per_s:.0f} GB/s over the {link.level}, e=2"
        found.append(Ratio(name, value, f"{', '.join(f'{each:,.0f}' for each in inputs)}: {shown}"))

    if layout.dp > 1 and layout.zero < 3:
        add("dp", "data parallel, T and n", layout.dp, data_parallel, tokens * job.grad_accum, layout.dp)
    if layout.zero == 3:
        add("dp", "fully sharded, s b and n", layout.shard, fully_sharded, tokens, layout.shard)
    if layout.tp > 1:
        add("tp", "tensor parallel, h and t", layout.tp, tensor_parallel, job.shape.hidden, layout.tp)
    if layout.pp > 1:
        layers = job.shape.layers / layout.pp
        add("pp", "pipeline, h and l", layout.pp, pipeline, job.shape.hidden, layers)
    return found
