"""Rates of GPUs by name, and the constants of software stacks.

A comment behind a number says where it comes from; without one it is measured here or counted. MAMF and bandwidths are
those of github.com/stas00/ml-engineering.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from samecurve.specs import gpus

MEASURED_SHARE = 0.8  # best product by the data sheet's peak: assumed, as 794 of 989 TFLOP/s, measured on an H100
LEAST_OF_LABEL = 0.9  # memory that torch sees by the label's: assumed; a T4's is 0.91, an L4's 0.92
SEEN_SHARE = 0.985  # GiB that torch sees by GB of the label: assumed, as 39.4 of an A100-40GB's 40
PROCESS_GIB = 0.6  # of a process on a CPU, beside its tensors: assumed

_GATHER = 361.4  # GB/s of an all-gather of 16 GiB on 8 H200s (measured)
# GB/s of bus bandwidth of an all-gather in a full node, large payloads, by the links of gpus.csv. NVLink 2 and 3 are
# scaled by NVIDIA's rates of an all-reduce (122 and 232 for 370 GB/s), NVLink 5 and the slower links of export versions
# by data sheets.
LINKS = {
    "NVLink2": _GATHER * 122 / 370,
    "NVLink3": _GATHER * 232 / 370,
    "NVLink4": _GATHER,
    "NVLink5": _GATHER * 2,
    "H800": _GATHER * 400 / 900,
    "A800": _GATHER * 232 / 370 * 400 / 600,
    "PCIe3": 12,  # assumed, half of PCIe 4
    "PCIe4": 24,  # measured all-reduce
    "PCIe5": 48,  # measured all-reduce
    "MI300X": 312.9,  # measured
    "as MI300X": 312.9,  # assumed
    "CDNA2": 100,  # assumed: two rings over Infinity Fabric links of 50 GB/s (AMD's MI250 documentation)
}
# GB/s between a GPU and host memory, by the same links: 87 % of a PCIe generation's nominal rate, assumed.
HOST_LINKS = {**dict.fromkeys(("PCIe3", "NVLink2"), 14), **dict.fromkeys(("PCIe4", "NVLink3", "A800", "CDNA2"), 27)}
PCIE_5 = 55


@dataclass(frozen=True)
class Gpu:
    """Rates of one GPU.

    Attributes:
        matmul_tflops: best measured bf16 product, else MEASURED_SHARE of the data sheet's.
        fp8_tflops: the same in fp8; 0 if the GPU has none.
        hbm_gb_per_s: memory bandwidth of the data sheet.
        bus_gb_per_s: bus bandwidth of an all-gather of a full node, large payloads.
        memory_gib: what torch sees.
        generation: key of SUSTAINED and ATTENTION.
        fp32_tflops: products in fp32; 0: as fast as bf16, for want of a number.
        sms: streaming multiprocessors; 0 if they are not known, or for a CPU.
        is_measured: whether matmul_tflops is.
        pcie_gb_per_s: to and from host memory.
    """

    matmul_tflops: float
    fp8_tflops: float
    hbm_gb_per_s: float
    bus_gb_per_s: float
    memory_gib: float
    generation: str
    fp32_tflops: float = 0
    sms: int = 0
    is_measured: bool = False
    pcie_gb_per_s: float = PCIE_5


# One core of a server (AMD EPYC of 2023, 2026-11-26; runs calibrate it for other processors): bench matmul in fp32, a
# copy of 64 MiB, bench collectives with Gloo between processes of a host. A host's 64 GiB are assumed.
CPU = Gpu(0.1, 0, 20, 1.3, 64, "cpu", 0.1, is_measured=True)


@lru_cache(maxsize=1)
def rows() -> dict[str, Gpu]:
    """Return the GPUs by the regular expression of their names; the first that matches counts."""
    known = {}
    for row in gpus.rows():
        best, fp8 = row.best or MEASURED_SHARE * row.half, row.best_fp8 or MEASURED_SHARE * row.fp8
        known[row.pattern] = Gpu(
            best, fp8, row.hbm, LINKS[row.link], row.gib or SEEN_SHARE * row.label, row.generation or "other",
            MEASURED_SHARE * row.fp32, row.sms, bool(row.best), HOST_LINKS.get(row.link, PCIE_5),
        )  # fmt: skip
    return {**known, r"^cpu$": CPU}


def gpu(kind: str) -> Gpu:
    """Look up a GPU as `known_gpu` does; an unknown kind gets the rates of an A100."""
    return known_gpu(kind) or _with_memory(replace(rows()["A100"], sms=0), kind)


def known_gpu(kind: str) -> Gpu | None:
    """Look up a GPU by a kind such as H100-80GB or by torch's device name, in any case. None: it has no row.

    A kind with another memory than its row's, such as V100-16GB, has that memory.
    """
    pattern = _pattern(kind)
    return _with_memory(rows()[pattern], kind) if pattern else None


def _with_memory(card: Gpu, kind: str) -> Gpu:
    _, label = split_name(kind)
    is_same = LEAST_OF_LABEL * label <= card.memory_gib <= label
    is_host = label > 2 * card.memory_gib  # the 480 GB in the name of a GH200 are the CPU's
    return card if not label or is_same or is_host else replace(card, memory_gib=SEEN_SHARE * label)


def is_unknown(kind: str) -> bool:
    """Whether `gpu` can only guess a kind's rates; those of a cluster file's `device` are given."""
    return bool(kind) and kind != "device" and not known_gpu(kind)


@lru_cache  # a search asks for each choice
def _pattern(kind: str) -> str | None:
    """Find the row of a kind. None: there is none, or only that of another variant, such as a laptop's GPU."""
    name, _ = split_name(kind)
    patterns = (pattern for pattern in rows() if re.search(pattern, name, re.IGNORECASE))
    return None if _VARIANTS.search(kind) else next(patterns, None)


def known_names() -> list[str]:
    """List the GPUs that `known_gpu` finds, for messages."""
    return [_readable(name) for pattern in rows() for name in pattern.split("|")]


@lru_cache(maxsize=64)
def canonical(kind: str) -> str:
    """Name a GPU as its row does, by which H100-80GB is NVIDIA H100 80GB HBM3; an unknown kind keeps its own name."""
    pattern = _pattern(kind)
    return _readable(pattern) if pattern else kind


def _readable(pattern: str) -> str:
    return pattern.replace(".*", "-").replace(r"\b", "").replace(r"\W?", "").strip("^$").replace("?", "")


# Names of GPUs as people, runs.csv and torch write them: RTX-4090-24GB, V100-16GB, NVIDIA A100-PCIE-40GB.
_MEMORY = re.compile(r"[\s_-]*(?<![A-Za-z\d.])(\d+)\s*G(?:i?B)?(?![A-Za-z0-9])", re.IGNORECASE)
# Slower or faster parts with the number of another: they have no row of their own.
_VARIANTS = re.compile(r"4090\W?D\b|[34]090\W?Ti|\bLaptop|\bMobile|Max-?Q|\b[34]0\d0M\b", re.IGNORECASE)
_DIES = re.compile("MI250.*128GB", re.IGNORECASE)  # both dies' memory, each of which is a GPU


def split_name(kind: str) -> tuple[str, float]:
    """Split a kind into its name and the GB of memory in it, 0 if there are none.

    The name ends with these GB, wherever they were, and a bare number such as 3090 is a GeForce RTX.
    """
    match = _MEMORY.search(kind)
    name = _MEMORY.sub("", kind, count=1).strip()
    name = re.sub(r"^(?:GeForce\W*)?(?=\d{4}(?!\d))", "RTX ", name, flags=re.IGNORECASE)
    if not match:
        return name, 0
    name = f"{name} {match[1]}GB"
    return name, float(match[1]) / (2 if _DIES.search(name) else 1)


# Constants of a software stack that no data sheet gives; scripts/fit_planner.py fits them to published runs.

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


# By generation (assumed): the share of the best measured product that a GPU sustains for minutes under its power limit,
# and the share of an A100's efficiency that fused attention kernels of 2023, written for Ampere, reach.
SUSTAINED = {"ampere": 1.0, "hopper": 0.88, "blackwell": 0.8, "other": 0.7, "cpu": 1.0}
ATTENTION = {"ampere": 1.0, "hopper": 0.75, "blackwell": 0.6, "other": 0.6, "cpu": 1.0}
# FlashAttention 2 is about twice as fast as the first (arXiv:2307.08691), with which llm-foundry was measured.
FIRST_FLASH_ATTENTION = {"llm-foundry-fsdp": 0.5}
_MEGATRON = ("megatron", "megatron-core", "megatron-lm", "megatron-deepspeed", "nemo")
ALIASES = {**dict.fromkeys(_MEGATRON, "megatron"), "fsdp": "llm-foundry-fsdp"}
FUSED_NORMS = {"nanotron"}  # stacks whose RMSNorm is one kernel
# What becomes of inputs that sequence parallelism gathers: DTensor keeps them. Not listed: freed, and gathered again.
GATHERED = {"fsdp2": "kept", "tp": "kept", **dict.fromkeys(_MEGATRON, "one buffer")}
# Stacks whose selective recomputation is that of arXiv:2205.05198; in others it is by operator.
ATTENTION_ALONE = {"nanotron", *_MEGATRON}
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
