"""GPUs: data-sheet rates, and measured ones from hardware.json with its sources."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from samecurve.planner.constants import ASSUMED, DATA_SHEET, HARDWARE_JSON, MEASURED, Constant

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
