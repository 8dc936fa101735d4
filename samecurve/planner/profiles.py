"""Constants of a software stack that no data sheet gives; scripts/fit_planner.py fits them to published runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from samecurve.planner.constants import ASSUMED, MEASURED, Constant

PATH = Path(__file__).with_name("profiles.json")


@dataclass(frozen=True)
class Profile:
    """At most a dozen constants of one stack.

    Attributes:
        matmul_share: of the best measured product's rate that large products sustain in training.
        attention_share: of the same rate that a fused attention kernel reaches.
        traffic: bytes that element-wise operations move, as a multiple of the activations that they produce.
        layer_floor_us: host time to launch one layer's forward.
        rank_floor_us: least time of one layer's forward and backward, per rank of a tensor-parallel group: ranks wait
            for the slowest host at each collective.
        pipeline_rank_floor_us: the same in a pipeline.
        ring_step_us: latency of one ring step of a collective across nodes, all calls of a layer together.
        overlap: share of the data-parallel communication that may hide behind the backward pass.
        network_share: attained share of the network's nominal rate, beside NIC_SHARE.
        step_us: host time per step: data, logging, clipping.
        gathered_inputs: under sequence parallelism, inputs of tensor-parallel products that are gathered but not freed
            yet, of all layers together, in bytes per token and unit of hidden size. The host launches a number of
            gathers ahead of the GPU; in a pipeline, sends and receives hold it back.
        logits_bytes: bytes per logit at the peak of the loss.
    """

    matmul_share: float = 0.85
    attention_share: float = 0.5
    traffic: float = 1.0
    layer_floor_us: float = 300.0
    rank_floor_us: float = 100.0
    pipeline_rank_floor_us: float = 100.0
    ring_step_us: float = 12.0
    overlap: float = 0.8
    network_share: float = 0.8
    step_us: float = 20000.0
    gathered_inputs: float = 50.0
    logits_bytes: float = 12.0


CONSTANTS = tuple(each.name for each in fields(Profile))
SUSTAINED = {
    generation: Constant(share, "share of the best product's rate", ASSUMED, "under a power limit, for minutes")
    for generation, share in {"ampere": 1.0, "hopper": 0.88, "blackwell": 0.8, "other": 0.7, "cpu": 1.0}.items()
}
ATTENTION = {
    generation: Constant(
        share, "share of an A100's efficiency", ASSUMED, "fused kernels of 2023 were written for Ampere"
    )
    for generation, share in {"ampere": 1.0, "hopper": 0.75, "blackwell": 0.6, "other": 0.6, "cpu": 1.0}.items()
}
# FlashAttention 2 is about twice as fast as the first, with which llm-foundry was measured.
FIRST_FLASH_ATTENTION = {
    "llm-foundry-fsdp": Constant(0.5, "share of FlashAttention 2's rate", MEASURED, "arXiv:2307.08691")
}
ALIASES = {
    "megatron-core": "megatron",
    "megatron-lm": "megatron",
    "megatron-deepspeed": "megatron",
    "nemo": "megatron",
    "fsdp": "llm-foundry-fsdp",
}
FUSED_NORMS = {"nanotron"}  # stacks whose RMSNorm is one kernel
# What becomes of inputs that sequence parallelism gathers: DTensor keeps them. Not listed: freed, and gathered again.
GATHERED = {"fsdp2": "kept", "tp": "kept"}
GATHERED |= dict.fromkeys(("megatron", *(name for name in ALIASES if ALIASES[name] == "megatron")), "one buffer")
# Stacks whose selective recomputation is that of arXiv:2205.05198; in others it is by operator.
ATTENTION_ALONE = {"megatron", "nanotron", *(name for name in ALIASES if ALIASES[name] == "megatron")}
BY_COST = {"nanotron"}  # stacks that cut a pipeline by cost, head included


@lru_cache(maxsize=1)
def shipped() -> dict:
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {"stacks": {}}


@lru_cache(maxsize=64)
def profile(stack: str) -> Profile:
    """Look up a stack's constants; an unknown stack gets those of `default`, or the class's."""
    stacks = shipped()["stacks"]
    name = stack if stack in stacks else ALIASES.get(stack, stack)
    return replace(Profile(), **stacks.get(name, stacks.get("default", {})))


def syncs_every_micro_batch(stack: str, zero: int, pipeline: bool) -> bool:
    """Whether gradients are averaged after each micro-batch: nanotron does under ZeRO-0 with a pipeline."""
    return stack == "nanotron" and zero == 0 and pipeline


def is_known(stack: str) -> bool:
    return stack in shipped()["stacks"]


def sustained(generation: str) -> float:
    """Share of the best measured product that a GPU of a generation sustains for minutes, under its power limit."""
    return SUSTAINED[generation]


def attention_rate(generation: str, stack: str) -> float:
    """Share of a stack's attention efficiency that a GPU of a generation reaches with the stack's kernel."""
    return ATTENTION[generation] * FIRST_FLASH_ATTENTION.get(stack, 1)
