"""GPUs and links: data-sheet rates, and measured bus bandwidth from hardware.json with its sources."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

MIB, GIB = 2**20, 2**30
NIC_SHARE = 0.73  # of the nominal rate, large payloads; hardware.json: per_accelerator_nic_rate
UNCROWDED_NODES = 16
MEASURED_SHARE = 0.8  # best measured product by the data sheet's peak: 794 of 989 TFLOP/s on an H100, assumed elsewhere
PROCESS_GIB = 0.6  # resident memory of a process on a CPU beside its tensors: Python, torch and libraries (assumed)


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


def _nvlink(reference_gb_per_s: float) -> float:
    """Scale the all-gather bandwidth measured on 8 H200s by the all-reduce rates of two NVLink generations."""
    buses = measured()["bus_bandwidth_GBps"]
    gathered = buses["h200_8gpu_16GiB_by_collective"]["all_gather"]
    return gathered * reference_gb_per_s / buses["nvidia_gtc_slide_allreduce_busbw_GBps"]["NVLink4"]


def gpu(kind: str) -> Gpu:
    """Look up a GPU as `known_gpu` does; an unknown kind gets the rates of an A100."""
    return known_gpu(kind) or _rows()["A100"]


def known_gpu(kind: str) -> Gpu | None:
    """Look up a GPU by a kind such as H100-80GB or by torch's device name, in any case. None: it has no row."""
    return next((row for pattern, row in _rows().items() if re.search(pattern, kind, re.IGNORECASE)), None)


def known_names() -> list[str]:
    """List the GPUs that `known_gpu` finds, for messages."""
    return [_readable(name) for pattern in _rows() for name in pattern.split("|")]


def canonical(kind: str) -> str:
    """Name a GPU as its row does, by which H100-80GB is NVIDIA H100 80GB HBM3; an unknown kind keeps its own name."""
    rows = (_readable(pattern) for pattern in _rows() if re.search(pattern, kind, re.IGNORECASE))
    return next(rows, kind)


def _readable(pattern: str) -> str:
    return pattern.replace(".*", "-").replace(r"\b", "").strip("^$").replace("?", "")


# TFLOP/s of fp32 on the data sheets, without TF32, which torch leaves off.
FP32 = {
    **{"GB200|GB300": 80, "B300": 75, "B200": 75, "GH200": 67, "H200": 67, "H800": 67, r"H20\b": 44},
    **{"H100.*NVL": 60, "H100.*PCIe": 51, "H100": 67, "A800": 19.5, "A100.*40": 19.5, "A100.*PCIe": 19.5, "A100": 19.5},
    **{"MI325X": 163.4, "MI300X": 163.4, "V100": 15.7, "L40S": 91.6, r"L40\b": 90.5, r"\bL4\b": 30.3, "A6000": 38.7},
    **{r"A40\b": 37.4, r"A10G?\b": 31.2, "RTX.*4090$": 82.6, "RTX.*3090$": 35.6, r"T4\b": 8.1},
}


@lru_cache(maxsize=1)
def _rows() -> dict[str, Gpu]:
    """GPUs by the regular expression of their names; the first that matches counts."""
    return {
        name: replace(each, fp32_tflops=MEASURED_SHARE * FP32[name]) if name in FP32 else each
        for name, each in _cards().items()
    }


def _cards() -> dict[str, Gpu]:
    rates = measured()["matmul_TFLOPs"]
    best, fp8 = rates["MAMF_bf16_measured"], rates["MAMF_fp8_measured"]
    h100, slides = best["H100 SXM"], measured()["bus_bandwidth_GBps"]["nvidia_gtc_slide_allreduce_busbw_GBps"]
    # NVLink 5 has twice the rate of NVLink 4, with which NVIDIA's slide ends
    nvlink3, nvlink4, nvlink5 = _nvlink(slides["NVLink3"]), _nvlink(slides["NVLink4"]), 2 * _nvlink(slides["NVLink4"])
    pcie4, pcie5 = measured()["bus_bandwidth_GBps"]["pcie"]["allreduce_pcie4"], 48.0

    def card(tflops: float, hbm_gb_per_s: float, bus_gb_per_s: float, memory_gib: float, fp8: float = 0) -> Gpu:
        """Describe a GPU of which only the data sheet's dense peaks are known."""
        peak, low = MEASURED_SHARE * tflops, MEASURED_SHARE * fp8
        return Gpu(peak, low, hbm_gb_per_s, bus_gb_per_s, memory_gib, "other")

    return {
        r"GB200|GB300": Gpu(best["GB200"], fp8["GB200"], 8000, nvlink5, 184, "blackwell"),
        r"B300": Gpu(best["B300"], fp8["B300"], 8000, nvlink5, 268, "blackwell"),
        r"B200": Gpu(best["B200"], fp8["B200"], 8000, nvlink5, 178, "blackwell"),
        r"GH200": Gpu(best["GH200"], fp8["GH200"], 4000, nvlink4, 94.5, "hopper"),
        r"H200": Gpu(h100, fp8["H200"], 4800, nvlink4, 139.8, "hopper"),
        # export versions: links of 400 GB/s (H800, A800), or fewer products per second (H20)
        r"H800": Gpu(h100, fp8["H100"], 3350, nvlink4 * 400 / 900, 79.1, "hopper"),
        r"H20\b": Gpu(h100 * 148 / 989.5, fp8["H100"] * 148 / 989.5, 4000, nvlink4, 95.6, "hopper"),
        r"H100.*NVL": card(835, 3900, pcie5, 93.1, 1671),
        r"H100.*PCIe": card(756, 2000, pcie5, 79.1, 1513),
        r"H100": Gpu(h100, fp8["H100"], 3350, nvlink4, 79.1, "hopper"),
        r"A800": Gpu(best["A100 SXM"], 0, 2039, nvlink3 * 400 / 600, 79.2, "ampere"),
        r"A100.*40": Gpu(best["A100 SXM"], 0, 1555, nvlink3, 39.4, "ampere"),
        r"A100.*PCIe": Gpu(best["A100 PCIe"], 0, 1935, pcie4, 79.2, "ampere"),
        r"A100": Gpu(best["A100 SXM"], 0, 2039, nvlink3, 79.2, "ampere"),
        r"MI325X": Gpu(best["MI325X"], 0, 6000, 312.9, 255, "other"),
        r"MI300X": Gpu(best["MI300X"], 0, 5300, 312.9, 191, "other"),
        r"V100": Gpu(100, 0, 900, _nvlink(slides["NVLink2"]), 31.7, "other"),
        r"L40S": card(362, 864, pcie4, 44.4, 733),
        r"L40\b": card(181, 864, pcie4, 44.4, 362),
        r"\bL4\b": card(121, 300, pcie4, 22.0, 242),
        r"A6000": card(155, 768, pcie4, 47.4),
        r"A40\b": card(150, 696, pcie4, 44.4),
        r"A10G?\b": card(125, 600, pcie4, 22.0),
        # the end of the name excludes the slower 4090 D and GPUs of laptops
        r"RTX.*4090$": card(165, 1008, pcie4, 23.5, 330),
        r"RTX.*3090$": card(71, 936, pcie4, 23.5),
        r"T4\b": card(65, 320, pcie4 / 2, 14.6),  # PCIe 3
        r"^cpu$": CPU,
    }


@dataclass(frozen=True)
class Link:
    """A connection of a group of ranks: GB/s of bus bandwidth per rank, and seconds per ring step."""

    level: str
    bus_gb_per_s: float
    step_seconds: float


# One core of a server (AMD EPYC of 2023, fp32; memory by a copy of 64 MiB) and Gloo between processes of its host, as
# `bench matmul` and `bench collectives` measured them on 2026-11-26. Runs calibrate them for other processors.
CPU = Gpu(0.1, 0, 20, 1.3, 64, "cpu", 0.1)
NODE_STEP_SECONDS = 4e-6
CPU_STEP_SECONDS = 5e-4  # of Gloo over the loopback interface, half of an all-reduce of some KiB
DEFAULT_NODE_GBIT = 1600


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
    points = measured()["bus_bandwidth_GBps"]["h200_8gpu_allreduce_busbw_GBps_by_payload"]
    units = {"KiB": 2**10, "MiB": MIB, "GiB": GIB}
    top = max(points.values())
    return tuple((math.log2(int(name[:-3]) * units[name[-3:]]), value / top) for name, value in points.items())
