"""GPUs and links: data-sheet rates, and measured bus bandwidth from hardware.json with its sources."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from samecurve.planner.constants import ASSUMED, DATA_SHEET, HARDWARE_JSON, MEASURED, Constant

MIB, GIB = 2**20, 2**30
NIC_SHARE = Constant(
    0.73, "share of the nominal rate, large payloads", MEASURED, f"{HARDWARE_JSON}: per_accelerator_nic_rate"
)
UNCROWDED_NODES = Constant(16, "nodes", ASSUMED, f"{HARDWARE_JSON}: h100_efa_256MB_by_nodes_GBps, see `crowding`")
MEASURED_SHARE = Constant(
    0.8, "best product by the data sheet's peak", ASSUMED, "as 794 of 989 TFLOP/s, measured on an H100"
)
PROCESS_GIB = Constant(0.6, "GiB of a process on a CPU", ASSUMED, "Python, torch and libraries beside its tensors")


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


_SLIDES = "nvidia_gtc_slide_allreduce_busbw_GBps"
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
    memory_gib: float,
    generation: str = "other",
) -> Gpu:
    """Describe a GPU. Products that are not measured (plain numbers) are the data sheet's dense peaks; 0: none."""
    best, low = (each if isinstance(each, Constant) or not each else _of_peak(each) for each in (tflops, fp8))
    memory = Constant(memory_gib, "GiB", MEASURED, "memory of the device as torch reports it")
    return Gpu(best, low, Constant(hbm_gb_per_s, "GB/s", DATA_SHEET, "memory bandwidth"), bus, memory, generation)


def _cards() -> dict[str, Gpu]:
    h100, h100_fp8, a100 = _best("H100 SXM"), _best("H100", "fp8"), _best("A100 SXM")
    by_peak = "an H100's by the data sheets' peaks"
    h20, h20_fp8 = (Constant(each * 148 / 989.5, "TFLOP/s", ASSUMED, by_peak) for each in (h100, h100_fp8))
    nvlink3, nvlink4, pcie4, pcie5 = _nvlink("NVLink3"), _nvlink("NVLink4"), _pcie("4"), _pcie("5")
    nvlink5 = _nvlink("NVLink4", 2, "2, the data sheets' rates of NVLink 5 and 4")  # the slides end with NVLink 4
    h800 = _nvlink("NVLink4", 400 / 900, "the data sheets' 400 of 900 GB/s")
    a800 = _nvlink("NVLink3", 400 / 600, f"{_SLIDES}, NVLink3, and the data sheets' 400 of 600 GB/s")
    mi300x = Constant(312.9, "GB/s", MEASURED, f"{HARDWARE_JSON}: mi300x, 8gpu")
    mi325x = Constant(312.9, "GB/s", ASSUMED, "as an MI300X's")
    pcie3 = Constant(pcie4 / 2, "GB/s", ASSUMED, "PCIe 3: half of PCIe 4")
    return {
        r"GB200|GB300": _card(_best("GB200"), _best("GB200", "fp8"), 8000, nvlink5, 184, "blackwell"),
        r"B300": _card(_best("B300"), _best("B300", "fp8"), 8000, nvlink5, 268, "blackwell"),
        r"B200": _card(_best("B200"), _best("B200", "fp8"), 8000, nvlink5, 178, "blackwell"),
        r"GH200": _card(_best("GH200"), _best("GH200", "fp8"), 4000, nvlink4, 94.5, "hopper"),
        r"H200": _card(h100, _best("H200", "fp8"), 4800, nvlink4, 139.8, "hopper"),
        # export versions: links of 400 GB/s (H800, A800), or fewer products per second (H20)
        r"H800": _card(h100, h100_fp8, 3350, h800, 79.1, "hopper"),
        r"H20\b": _card(h20, h20_fp8, 4000, nvlink4, 95.6, "hopper"),
        r"H100.*NVL": _card(835, 1671, 3900, pcie5, 93.1),
        r"H100.*PCIe": _card(756, 1513, 2000, pcie5, 79.1),
        r"H100": _card(h100, h100_fp8, 3350, nvlink4, 79.1, "hopper"),
        r"A800": _card(a100, 0, 2039, a800, 79.2, "ampere"),
        r"A100.*40": _card(a100, 0, 1555, nvlink3, 39.4, "ampere"),
        r"A100.*PCIe": _card(_best("A100 PCIe"), 0, 1935, pcie4, 79.2, "ampere"),
        r"A100": _card(a100, 0, 2039, nvlink3, 79.2, "ampere"),
        r"MI325X": _card(_best("MI325X"), 0, 6000, mi325x, 255),
        r"MI300X": _card(_best("MI300X"), 0, 5300, mi300x, 191),
        r"V100": _card(125, 0, 900, _nvlink("NVLink2"), 31.7),
        r"L40S": _card(362, 733, 864, pcie4, 44.4),
        r"L40\b": _card(181, 362, 864, pcie4, 44.4),
        r"\bL4\b": _card(121, 242, 300, pcie4, 22.0),
        r"A6000": _card(155, 0, 768, pcie4, 47.4),
        r"A40\b": _card(150, 0, 696, pcie4, 44.4),
        r"A10G?\b": _card(125, 0, 600, pcie4, 22.0),
        # the end of the name excludes the slower 4090 D and GPUs of laptops
        r"RTX.*4090$": _card(165, 330, 1008, pcie4, 23.5),
        r"RTX.*3090$": _card(71, 0, 936, pcie4, 23.5),
        r"T4\b": _card(65, 0, 320, pcie3, 14.6),
        r"^cpu$": CPU,
    }


@dataclass(frozen=True)
class Link:
    """A connection of a group of ranks: GB/s of bus bandwidth per rank, and seconds per ring step."""

    level: str
    bus_gb_per_s: float
    step_seconds: float


_EPYC = "one core of a server (AMD EPYC of 2023), 2026-11-26"  # runs calibrate it for other processors
_CORE = Constant(0.1, "TFLOP/s", MEASURED, f"bench matmul in fp32, {_EPYC}")
CPU = Gpu(
    _CORE,
    0,
    Constant(20, "GB/s", MEASURED, f"a copy of 64 MiB, {_EPYC}"),
    Constant(1.3, "GB/s", MEASURED, f"bench collectives, Gloo between processes of a host, {_EPYC}"),
    Constant(64, "GiB", ASSUMED, "memory of a host; a run reads its own"),
    "cpu",
    _CORE,
)
NODE_STEP_SECONDS = Constant(4e-6, "s of a ring step inside a node", ASSUMED, "latency of NVLink and a kernel")
CPU_STEP_SECONDS = Constant(
    5e-4, "s of a ring step", MEASURED, f"half of an all-reduce of some KiB, Gloo over the loopback interface, {_EPYC}"
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
