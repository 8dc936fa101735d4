"""GPUs by name, and links: measured bus bandwidth from hardware.json with its sources."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from samecurve.planner.cards import EPYC, LEAST_OF_LABEL, NIC_SHARE, Gpu, labelled, measured, rows
from samecurve.planner.constants import ASSUMED, HARDWARE_JSON, MEASURED, Constant

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
