"""Seconds of one micro-batch's kernels on one rank, without communication."""

from __future__ import annotations

from dataclasses import dataclass

from samecurve.planner.activations import bytes_per_score, expert_imbalance, layer_bytes, mask_elements, score_bytes
from samecurve.planner.hardware import ATTENTION, FIRST_FLASH_ATTENTION, SUSTAINED, Profile
from samecurve.planner.job import Job

BACKWARD_ATTENTION = 2.5  # five products instead of two, as the fused kernel recomputes the scores
COMPILED_FLOOR = 0.5  # share of launches that remain in compiled layers (assumed)
EXPERT_LAUNCH_US = 100  # of an expert that takes its turn: ten kernels to select, multiply and add (assumed)
# Host time on a CPU, whose core also computes, of a layer's forward pass and of a step without its layers: what a layer
# of width 32 adds to a step, by 2.5, and what 4 of them leave, without collectives. Hooks are part of it: DTensor's,
# FSDP2's, and ZeRO-3's on each module. Measured (AMD EPYC, torch 2.13.0, deepspeed 0.19.8, 2026-11-26).
CPU_HOST_US = {
    "": (310, 12_000),
    "fsdp2": (820, 23_000),
    "tp": (2_460, 25_000),
    "deepspeed": (550, 16_000),
    "zero3": (2_790, 22_000),
}
# ZeRO-3's hooks gather and release each module's weights, on a GPU's host, too.
ZERO3_HOOKS_US = 2_790 - 550
ALIGNED = 8  # elements, 16 bytes in 16 bits, by which tensor cores want widths to be divisible
UNALIGNED = 272.73 / 398.38  # share of the rate: MLPs of width 10,922 and 10,944 on an H100 (ml-engineering)
UNFUSED = 0.6  # share of large products' rate that attention's have without a fused kernel (assumed)
MASKED = 0.6  # share of the causal kernel's rate of SDPA's memory-efficient kernel, with a mask (assumed)
SCORE_TRAFFIC = 2.0  # bytes moved per byte of kept scores, written and read once, forward
# The single operations of models/attention/ring.py, forward: two products, and in fp32 a scale, a log-sum-exp (6
# passes), a difference and an exponential.
RING_TRAFFIC = 64  # bytes moved per visible score
FP8_CASTS = {"tensorwise": 6, "rowwise": 8, "": 6}  # bytes moved per element of a product's matrices


@dataclass(frozen=True)
class Seconds:
    """Forward and backward seconds."""

    forward: float
    backward: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> float:
        return self.forward + self.backward


def product_seconds(job: Job, rows: float, inputs: float, outputs: float, constants: Profile) -> float:
    """Return the seconds of one matrix product (rows, inputs) x (inputs, outputs).

    Arithmetic at the sustained rate, and the memory traffic of the three matrices, which a short or thin product does
    not hide (the roofline's two terms, added).

    Args:
        job: gives GPU, precision and whether casts are compiled.
        rows, inputs, outputs: sizes of the matrices.
    """
    flops = 2 * rows * inputs * outputs
    elements = rows * inputs + inputs * outputs + rows * outputs
    share = constants.matmul_share * SUSTAINED[job.card.generation]
    rate = job.card.matmul_tflops * 1e12
    has_tensor_cores = job.card.generation != "cpu" and job.precision != "fp32"
    if job.flow and has_tensor_cores and (inputs % ALIGNED or outputs % ALIGNED):
        share *= UNALIGNED  # other stacks pad their sizes
    moved = job.element_bytes * elements
    if job.precision == "fp32" and job.card.fp32_tflops:
        rate = job.card.fp32_tflops * 1e12
    if job.precision == "fp8" and job.card.fp8_tflops:
        rate = job.card.fp8_tflops * 1e12
        moved += FP8_CASTS.get(job.fp8_recipe, 6) * elements / (2 if job.compile else 1)
    return flops / (rate * share) + moved / (job.card.hbm_gb_per_s * 1e9)


def layer(job: Job, constants: Profile) -> Seconds:
    """Return the seconds of one layer, the recomputed forward included in the backward."""
    (of_attention, of_mlp), attention = _products(job, constants), attention_seconds(job, constants)
    products = of_attention + of_mlp
    # element-wise operations move twice the bytes that they keep, read and written; scores' are part of attention
    kept = layer_bytes(job) - job.tokens * score_bytes(job)
    traffic = constants.traffic * 2 * kept / (job.card.hbm_gb_per_s * 1e9)
    forward = products + attention.forward + traffic
    if job.frozen and job.frozen.dequantized:  # read packed, written whole
        moved = (job.frozen.layer_bytes + job.element_bytes) * job.shape.layer_parameters / job.dims.tp
        products += moved / (job.card.hbm_gb_per_s * 1e9)
        forward = products + attention.forward + traffic
    # no products for gradients of frozen weights
    backward = (1 if job.frozen else 2) * products + attention.backward + 1.5 * traffic
    launch_us = _host_us(job, constants)[0]
    if not job.packed_experts:
        launch_us += EXPERT_LAUNCH_US * job.shape.experts / job.dims.ep
    floor = launch_us * 1e-6 * (COMPILED_FLOOR if job.compile else 1)
    if job.card.generation == "cpu":
        forward, backward = forward + floor, backward + 1.5 * floor
    else:  # short kernels wait for the host to launch them
        forward, backward = max(forward, floor), max(backward, 1.5 * floor)
    if job.checkpointing == "full":
        backward += forward
    elif job.keeps_products:
        repeated = _repeated_products(job, of_attention, of_mlp)
        backward += repeated + traffic + (0 if job.flash else attention.forward)
        backward += floor if job.card.generation == "cpu" else 0
    elif job.checkpointing == "selective":
        backward += attention.forward
    return Seconds(forward, backward)


def step_seconds(job: Job, constants: Profile) -> float:
    """Return the host's seconds of a step beside the layers: data, logging, clipping."""
    return 1e-6 * _host_us(job, constants)[1]


def _host_us(job: Job, constants: Profile) -> tuple[float, float]:
    """Return the host's microseconds of a layer's forward pass, and of a step without its layers."""
    gathers = job.stack == "deepspeed" and job.zero == 3
    if job.card.generation != "cpu":
        return constants.layer_floor_us + gathers * ZERO3_HOOKS_US, constants.step_us
    kind = job.stack
    if job.dims.tp > 1:
        kind = "tp"
    elif gathers:
        kind = "zero3"
    return CPU_HOST_US.get(kind, CPU_HOST_US[""])


def _products(job: Job, constants: Profile) -> tuple[float, float]:
    """Return the seconds of the products with weights, forward: those of attention and those of the MLP."""
    shape, split, tokens = job.shape, job.dims.tp, job.tokens
    width, experts = shape.hidden, max(shape.top_k, 1)
    queries = shape.attention_width * (1 + 2 * shape.kv_share) / split
    rows = tokens * experts  # of all experts together
    expert_rows = rows / max(shape.experts / job.dims.ep, 1) if shape.experts else rows
    calls = rows / expert_rows
    inner = shape.ffn / job.mlp_split
    up = product_seconds(job, expert_rows, width, inner * (2 if shape.gated else 1), constants)
    down = product_seconds(job, expert_rows, inner, width, constants)
    attention = product_seconds(job, tokens, width, queries, constants)
    attention += product_seconds(job, tokens, shape.attention_width / split, width, constants)
    return attention, calls * expert_imbalance(job) * (up + down)


def _repeated_products(job: Job, attention: float, mlp: float) -> float:
    """Return the seconds of those of `_products` that selective recomputation by operator repeats."""
    if job.shape.experts:  # grouped products, which are not kept
        repeated = mlp
    else:
        repeated = 0 if job.flow else mlp / (3 if job.shape.gated else 2)
    return repeated + (0 if job.flow else attention / 2)


def attention_seconds(job: Job, constants: Profile) -> Seconds:
    """Return the seconds of one layer's attention between tokens, without its linear products.

    Forward 4 s a FLOPs per token, half of them under the causal mask if fused; all of them where rows of several
    documents have a mask of their own.
    """
    shape, split, generation = job.shape, job.dims.tp, job.card.generation
    flops = 4 * job.tokens * job.seq * shape.attention_width / split
    tiles = job.flow and job.exchange == "ring"
    factor = BACKWARD_ATTENTION if job.flash else 2
    peak = job.card.matmul_tflops * 1e12 * SUSTAINED[generation]
    if job.flash and not tiles:
        rate = peak * constants.attention_share * ATTENTION[generation] * FIRST_FLASH_ATTENTION.get(job.stack, 1)
        if job.masked and generation != "cpu":
            # Ulysses gives a rank all pairs of a part of the heads
            pairs = mask_elements(job) / (job.dims.cp if job.exchange == "ulysses" else 1)
            forward = 4 * shape.attention_width / split * pairs / (MASKED * rate)
        else:
            forward = flops / 2 / rate
        return Seconds(forward, factor * forward)
    scores = shape.heads * job.seq * job.tokens / split
    if tiles:  # those that no query sees are left out
        flops, moved = flops / 2, RING_TRAFFIC * scores / 2
    else:
        moved = SCORE_TRAFFIC * bytes_per_score(job) * scores
    forward = flops / (peak * constants.matmul_share * UNFUSED)
    forward += constants.traffic * moved / (job.card.hbm_gb_per_s * 1e9)
    return Seconds(forward, factor * forward)


def head(job: Job, constants: Profile) -> Seconds:
    """Return the seconds of the output head and the loss."""
    vocab = job.shape.vocab / job.dims.tp
    product = product_seconds(job, job.tokens, job.shape.hidden, vocab, constants)
    moved = constants.logits_bytes * job.tokens * vocab / (job.card.hbm_gb_per_s * 1e9)
    return Seconds(product + moved, (1 + job.trains_head) * product + moved)


def optimizer(job: Job, parameters: float, constants: Profile) -> float:
    """Seconds of Adam over the rank's shard: each state read and written once, gradients read."""
    states = job.states
    moved = 2 * (states.optimizer + (states.master or states.weights)) + states.gradients + states.weights
    return constants.traffic * parameters * moved / (job.card.hbm_gb_per_s * 1e9)
