"""Numbers of machines and formulas with their units and origins."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

MEASURED, DATA_SHEET, ASSUMED = "measured elsewhere", "data sheet", "assumed"
FITTED, FILE, CALIBRATED = "fitted", "cluster file", "calibration"
ORIGINS = (MEASURED, DATA_SHEET, ASSUMED, FITTED, FILE, CALIBRATED)
HARDWARE_JSON = "samecurve/planner/hardware.json"


class Constant(float):
    """A number that knows its origin; the result of arithmetic with it is a plain float.

    Attributes:
        unit: such as GB/s, or what a share or a factor is of.
        origin: one of ORIGINS.
        source: what the origin is in detail: a file and its line, a paper, the machine of a measurement.
    """

    __slots__ = ("origin", "source", "unit")

    def __new__(cls, value: float, unit: str, origin: str, source: str) -> Constant:
        assert unit and source and origin in ORIGINS
        made = super().__new__(cls, value)
        made.unit, made.origin, made.source = unit, origin, source
        return made

    def __getnewargs__(self) -> tuple:
        """Return the arguments with which a copy is made."""
        return float(self), self.unit, self.origin, self.source


def plain(value: float) -> float:
    """Return a number as YAML shows it best: without its origin, whole where it is, without errors of rounding."""
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


def flat(name: str, value: Any) -> Iterator[tuple[str, Constant]]:
    """Generate the constants in nested mappings and tuples, with dotted names. What is absent, such as 0, has none."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat(f"{name}.{key or 'others'}", each)
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from flat(f"{name}.{index}", each)
    elif isinstance(value, Constant):
        yield name, value


# GPUs: data-sheet rates, and measured ones from hardware.json with its sources.


NIC_SHARE = Constant(
    0.73, "share of the nominal rate, large payloads", MEASURED, f"{HARDWARE_JSON}: per_accelerator_nic_rate"
)
MEASURED_SHARE = Constant(
    0.8, "best product by the data sheet's peak", ASSUMED, "as 794 of 989 TFLOP/s, measured on an H100"
)
LEAST_OF_LABEL = Constant(0.9, "memory that torch sees by the label's", ASSUMED, "a T4's is 0.91, an L4's 0.92")
SEEN_SHARE = Constant(0.985, "GiB that torch sees by GB of the label", ASSUMED, "as 39.4 of an A100-40GB's 40")


@dataclass(frozen=True)
class Gpu:
    """Rates of one GPU.

    Attributes:
        matmul_tflops: best measured bf16 product (MAMF of hardware.json), not the data sheet's.
        fp8_tflops: the same in fp8; 0 if the GPU has none.
        hbm_gb_per_s: memory bandwidth of the data sheet.
        bus_gb_per_s: bus bandwidth of an all-gather of a full node, large payloads.
        memory_gib: what torch sees.
        generation: key of the sustained rates in profiles.json.
        fp32_tflops: products in fp32; 0: as fast as bf16, for want of a number.
    """

    matmul_tflops: float
    fp8_tflops: float
    hbm_gb_per_s: float
    bus_gb_per_s: float
    memory_gib: float
    generation: str
    fp32_tflops: float = 0


@lru_cache(maxsize=1)
def measured() -> dict:
    return json.loads(Path(__file__).with_name("hardware.json").read_text(encoding="utf-8"))


def _nvlink(generation: str, share: float = 1, why: str = "") -> Constant:
    """Scale the all-gather bandwidth measured on 8 H200s by the all-reduce rates of two NVLink generations.

    Args:
        share: of that rate which the GPU's links have.
        why: reason of a share.
    """
    buses = measured()["bus_bandwidth_GBps"]
    gathered, slides = buses["h200_8gpu_16GiB_by_collective"]["all_gather"], buses[_SLIDES]
    rate = gathered * slides[generation] / slides["NVLink4"] * share
    own = share == 1 and generation == "NVLink4"
    text = f"{HARDWARE_JSON}: all_gather of 8 H200s" + (
        "" if own else f", scaled by {why or f'{_SLIDES}, {generation}'}"
    )
    return Constant(rate, "GB/s", MEASURED if own else ASSUMED, text)


_SLIDES = "nvidia_gtc_slide_allreduce_busbw_GBps"
# TFLOP/s of fp32 on the data sheets, without TF32, which torch leaves off; of AMD's, by matrix cores.
FP32 = {
    **{"GB200|GB300": 80, "B300": 75, "B200": 75, "GH200": 67, "H200": 67, "H800": 67, r"H20\b": 44},
    **{"H100.*NVL": 60, "H100.*PCIe": 51, "H100": 67, "A800": 19.5, "A100.*PCIe.*40": 19.5, "A100.*40": 19.5},
    **{"A100.*PCIe": 19.5, "A100": 19.5, r"A30\b": 10.3, "MI355X": 157.3, "MI325X": 163.4, "MI300X": 163.4},
    **{"MI250X": 47.9, "MI250": 45.3, "MI210": 45.3, "V100": 15.7},
    **{"L40S": 91.6, r"L40\b": 90.5, r"\bL4\b": 30.3, "RTX.*6000.*Ada": 91.1, "A6000": 38.7, r"A40\b": 37.4},
    **{r"A10G?\b": 31.2, "RTX.*4090": 82.6, "RTX.*3090": 35.6, r"RTX.*2080\W?Ti": 13.4},
}


@lru_cache(maxsize=1)
def rows() -> dict[str, Gpu]:
    """Return the GPUs by the regular expression of their names; the first that matches counts."""
    return {
        name: replace(each, fp32_tflops=_of_peak(FP32[name])) if name in FP32 else each
        for name, each in _cards().items()
    }


def _pcie(generation: str) -> Constant:
    rate = measured()["bus_bandwidth_GBps"]["pcie"][f"allreduce_pcie{generation}"]
    return Constant(rate, "GB/s", MEASURED, f"{HARDWARE_JSON}: allreduce_pcie{generation}")


def _best(name: str, kind: str = "bf16") -> Constant:
    table = f"MAMF_{kind}_measured"
    return Constant(measured()["matmul_TFLOPs"][table][name], "TFLOP/s", MEASURED, f"{HARDWARE_JSON}: {table}, {name}")


def _of_peak(tflops: float) -> Constant:
    """Estimate the best product from the data sheet's dense peak."""
    return Constant(MEASURED_SHARE * tflops, "TFLOP/s", ASSUMED, f"{MEASURED_SHARE:g} of the data sheet's {tflops:g}")


def _card(
    tflops: float | Constant,
    fp8: float | Constant,
    hbm_gb_per_s: float,
    bus: Constant,
    memory_gib: float | Constant,
    generation: str = "other",
) -> Gpu:
    """Describe a GPU. Products that are not measured (plain numbers) are the data sheet's dense peaks; 0: none."""
    best, low = (each if isinstance(each, Constant) or not each else _of_peak(each) for each in (tflops, fp8))
    if not isinstance(memory_gib, Constant):
        memory_gib = Constant(memory_gib, "GiB", MEASURED, "memory of the device as torch reports it")
    return Gpu(best, low, Constant(hbm_gb_per_s, "GB/s", DATA_SHEET, "memory bandwidth"), bus, memory_gib, generation)


def labelled(gigabytes: float) -> Constant:
    """Estimate the memory that torch sees from the label's."""
    return Constant(SEEN_SHARE * gigabytes, "GiB", ASSUMED, f"{SEEN_SHARE:g} of the label's {gigabytes:g} GB")


def _cards() -> dict[str, Gpu]:
    """Return the rates by name.

    Data sheets of rows that are easily confused: NVIDIA A30 (2021), RTX 6000 Ada Generation (2022) and Turing's white
    paper (RTX 2080 Ti, fp32 sums); AMD Instinct MI200 series (2021), MI210 and MI355X (2025).
    """
    return {**_hopper_and_blackwell(), **_older_and_others(), **_on_pcie(), r"^cpu$": CPU}


def _hopper_and_blackwell() -> dict[str, Gpu]:
    h100, h100_fp8 = _best("H100 SXM"), _best("H100", "fp8")
    by_peak = "an H100's by the data sheets' peaks"
    h20, h20_fp8 = (Constant(each * 148 / 989.5, "TFLOP/s", ASSUMED, by_peak) for each in (h100, h100_fp8))
    nvlink4, pcie5 = _nvlink("NVLink4"), _pcie("5")
    nvlink5 = _nvlink("NVLink4", 2, "2, the data sheets' rates of NVLink 5 and 4")  # the slides end with NVLink 4
    h800 = _nvlink("NVLink4", 400 / 900, "the data sheets' 400 of 900 GB/s")
    return {
        r"GB200|GB300": _card(_best("GB200"), _best("GB200", "fp8"), 8000, nvlink5, 184, "blackwell"),
        r"B300": _card(_best("B300"), _best("B300", "fp8"), 8000, nvlink5, 268, "blackwell"),
        r"B200": _card(_best("B200"), _best("B200", "fp8"), 8000, nvlink5, 178, "blackwell"),
        r"GH200": _card(_best("GH200"), _best("GH200", "fp8"), 4000, nvlink4, 94.5, "hopper"),
        r"H200": _card(h100, _best("H200", "fp8"), 4800, nvlink4, 139.8, "hopper"),
        # export versions: links of 400 GB/s (H800, and A800 below), or fewer products per second (H20)
        r"H800": _card(h100, h100_fp8, 3350, h800, 79.1, "hopper"),
        r"H20\b": _card(h20, h20_fp8, 4000, nvlink4, 95.6, "hopper"),
        r"H100.*NVL": _card(835, 1671, 3900, pcie5, 93.1),
        r"H100.*PCIe": _card(756, 1513, 2000, pcie5, 79.1),
        r"H100": _card(h100, h100_fp8, 3350, nvlink4, 79.1, "hopper"),
    }


def _older_and_others() -> dict[str, Gpu]:
    a100, nvlink3, pcie4 = _best("A100 SXM"), _nvlink("NVLink3"), _pcie("4")
    a800 = _nvlink("NVLink3", 400 / 600, f"{_SLIDES}, NVLink3, and the data sheets' 400 of 600 GB/s")
    mi300x = Constant(312.9, "GB/s", MEASURED, f"{HARDWARE_JSON}: mi300x, 8gpu")
    as_mi300x = Constant(312.9, "GB/s", ASSUMED, "as an MI300X's")
    cdna2 = Constant(
        100, "GB/s", ASSUMED, "two rings over Infinity Fabric links of 50 GB/s (AMD's MI250 documentation)"
    )
    return {
        r"A800": _card(a100, 0, 2039, a800, 79.2, "ampere"),
        r"A100.*PCIe.*40": _card(_best("A100 PCIe"), 0, 1555, pcie4, 39.4, "ampere"),
        r"A100.*40": _card(a100, 0, 1555, nvlink3, 39.4, "ampere"),
        r"A100.*PCIe": _card(_best("A100 PCIe"), 0, 1935, pcie4, 79.2, "ampere"),
        r"A100": _card(a100, 0, 2039, nvlink3, 79.2, "ampere"),
        r"MI355X": _card(_best("MI355X"), 0, 8000, as_mi300x, labelled(288)),
        r"MI325X": _card(_best("MI325X"), 0, 6000, as_mi300x, 255),
        r"MI300X": _card(_best("MI300X"), 0, 5300, mi300x, 191),
        # CDNA2's dies are one GPU each, of which an MI250 has two: half of its data sheet's numbers
        r"MI250X": _card(191.5, 0, 1638, cdna2, labelled(64)),
        r"MI250": _card(181, 0, 1638, cdna2, labelled(64)),
        r"MI210": _card(181, 0, 1638, pcie4, labelled(64)),
        r"V100": _card(125, 0, 900, _nvlink("NVLink2"), 31.7),
    }


def _on_pcie() -> dict[str, Gpu]:
    pcie4 = _pcie("4")
    pcie3 = Constant(pcie4 / 2, "GB/s", ASSUMED, "PCIe 3: half of PCIe 4")
    return {
        r"A30\b": _card(165, 0, 933, pcie4, labelled(24)),
        r"L40S": _card(362, 733, 864, pcie4, 44.4),
        r"L40\b": _card(181, 362, 864, pcie4, 44.4),
        r"\bL4\b": _card(121, 242, 300, pcie4, 22.0),
        r"RTX.*6000.*Ada": _card(364.2, 728.5, 960, pcie4, labelled(48)),
        r"A6000": _card(155, 0, 768, pcie4, 47.4),
        r"A40\b": _card(150, 0, 696, pcie4, 44.4),
        r"A10G?\b": _card(125, 0, 600, pcie4, 22.0),
        r"RTX.*4090": _card(165, 330, 1008, pcie4, 23.5),
        r"RTX.*3090": _card(71, 0, 936, pcie4, 23.5),
        r"RTX.*2080\W?Ti": _card(53.8, 0, 616, pcie3, labelled(11)),
    }


EPYC = "one core of a server (AMD EPYC of 2023), 2026-11-26"  # runs calibrate it for other processors
_CORE = Constant(0.1, "TFLOP/s", MEASURED, f"bench matmul in fp32, {EPYC}")
CPU = Gpu(
    _CORE,
    0,
    Constant(20, "GB/s", MEASURED, f"a copy of 64 MiB, {EPYC}"),
    Constant(1.3, "GB/s", MEASURED, f"bench collectives, Gloo between processes of a host, {EPYC}"),
    Constant(64, "GiB", ASSUMED, "memory of a host; a run reads its own"),
    "cpu",
    _CORE,
)


# GPUs by name, and links: measured bus bandwidth from hardware.json with its sources.


MIB, GIB = 2**20, 2**30
UNCROWDED_NODES = Constant(16, "nodes", ASSUMED, f"{HARDWARE_JSON}: h100_efa_256MB_by_nodes_GBps, see `crowding`")
PROCESS_GIB = Constant(0.6, "GiB of a process on a CPU", ASSUMED, "Python, torch and libraries beside its tensors")


def gpu(kind: str) -> Gpu:
    """Look up a GPU as `known_gpu` does; an unknown kind gets the rates of an A100."""
    return known_gpu(kind) or _with_memory(rows()["A100"], kind)


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
    return card if not label or is_same or is_host else replace(card, memory_gib=labelled(label))


def is_unknown(kind: str) -> bool:
    """Whether `gpu` can only guess a kind's rates; those of a cluster file's `device` are given."""
    return bool(kind) and kind != "device" and not known_gpu(kind)


@lru_cache  # a search asks for each choice
def _pattern(kind: str) -> str | None:
    """Find the row of a kind. None: there is none, or only that of another variant, such as a laptop's GPU."""
    name, _ = split_name(kind)
    found = (pattern for pattern in rows() if re.search(pattern, name, re.IGNORECASE))
    return None if is_variant(kind) else next(found, None)


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


@dataclass(frozen=True)
class Link:
    """A connection of a group of ranks: GB/s of bus bandwidth per rank, and seconds per ring step."""

    level: str
    bus_gb_per_s: float
    step_seconds: float


NODE_STEP_SECONDS = Constant(4e-6, "s of a ring step inside a node", ASSUMED, "latency of NVLink and a kernel")
CPU_STEP_SECONDS = Constant(
    5e-4, "s of a ring step", MEASURED, f"half of an all-reduce of some KiB, Gloo over the loopback interface, {EPYC}"
)
DEFAULT_NODE_GBIT = Constant(1600, "Gbit/s of a node", ASSUMED, "the network cards of a DGX A100 (data sheet)")


def link(card: Gpu, gpus_per_node: int, node_gbit: float, ranks: int, stride: int, step_seconds: float) -> Link:
    """Find the link of a group of ranks at equal distances, while all such groups communicate at once.

    A group with one rank per node has an equal share of the node's cards with the node's other groups.

    Args:
        node_gbit: Gbit/s of a node's network cards together.
        ranks: number of ranks in the group.
        stride: distance between neighbours of the group, in ranks.
        step_seconds: latency of one ring step across nodes.
    """
    per_node = max(1, min(ranks, gpus_per_node // stride)) if stride < gpus_per_node else 1
    if per_node >= ranks:
        if card.generation == "cpu":
            return Link("host", card.bus_gb_per_s, CPU_STEP_SECONDS)
        return Link("node", card.bus_gb_per_s, NODE_STEP_SECONDS)
    network = node_gbit / 8 * NIC_SHARE * per_node / gpus_per_node * crowding(ranks / per_node)
    # a ring across nodes also uses the links inside them
    return Link("network", min(card.bus_gb_per_s, network), step_seconds)


def crowding(nodes: float) -> float:
    """Share of a network's rate that remains for a group over many nodes: the root of 16 over their number.

    hardware.json's chart of EFA (256 MB) falls from 85 to 33 GB/s (all-reduce) and from 55 to 11 (all-gather) between
    16 and 64 nodes, the latency of more ring steps included, which this share does not count.
    """
    return min(1.0, math.sqrt(UNCROWDED_NODES / nodes))


def ramp(payload_bytes: float) -> float:
    """Share of a node's peak bus bandwidth that a payload attains, by the curve measured on 8 H200s."""
    curve = _curve()
    size = math.log2(max(payload_bytes, 1))
    if size <= curve[0][0]:
        # latency decides below the measured sizes, so the rate falls with the size
        return curve[0][1] * 2 ** (size - curve[0][0])
    for (x0, y0), (x1, y1) in zip(curve, curve[1:], strict=False):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return 1.0


@lru_cache(maxsize=1)
def _curve() -> tuple[tuple[float, float], ...]:
    units = {"KiB": 2**10, "MiB": MIB, "GiB": GIB}
    return tuple((math.log2(int(name[:-3]) * units[name[-3:]]), share) for name, share in node_curve().items())


def node_curve() -> dict[str, Constant]:
    """Return the shares of a node's peak bus bandwidth by payload, in ascending order, such as 32KiB."""
    table = "h200_8gpu_allreduce_busbw_GBps_by_payload"
    points, source = measured()["bus_bandwidth_GBps"][table], f"{HARDWARE_JSON}: {table}"
    top = max(points.values())
    return {name: Constant(value / top, "share of the peak", MEASURED, source) for name, value in points.items()}


# Names of GPUs as people, runs.csv and torch write them: RTX-4090-24GB, V100-16GB, NVIDIA A100-PCIE-40GB.
_MEMORY = re.compile(r"[\s_-]*(?<![A-Za-z\d.])(\d+)\s*G(?:i?B)?(?![A-Za-z0-9])", re.IGNORECASE)
# Slower or faster parts with the number of another: they have no row of their own.
_VARIANTS = re.compile(r"4090\W?D\b|[34]090\W?Ti|\bLaptop|\bMobile|Max-?Q|\b[34]0\d0M\b", re.IGNORECASE)
_DIES = re.compile("MI250.*128GB", re.IGNORECASE)  # both dies' memory, each of which is a GPU


def split_name(kind: str) -> tuple[str, float]:
    """Split a kind into its name and the GB of memory in it, 0 if there are none.

    The name ends with these GB, wherever they were, and a bare number such as 3090 is a GeForce RTX.
    """
    found = _MEMORY.search(kind)
    name = _MEMORY.sub("", kind, count=1).strip()
    name = re.sub(r"^(?:GeForce\W*)?(?=\d{4}(?!\d))", "RTX ", name, flags=re.IGNORECASE)
    if not found:
        return name, 0
    name = f"{name} {found[1]}GB"
    return name, float(found[1]) / (2 if _DIES.search(name) else 1)


def is_variant(kind: str) -> bool:
    """Whether the number of a GPU stands for another one here, such as RTX 4090 D or a laptop's."""
    return bool(_VARIANTS.search(kind))


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
