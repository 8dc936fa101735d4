"""Links of a group of ranks, and bytes and seconds of the collectives over them, by ring algorithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.planner.hardware import Gpu
from samecurve.specs.gpus import MIB

NIC_SHARE = 0.73  # of the nominal rate, large payloads: busbw (k - 1) / (n - 1) of k nodes (ml-engineering)
UNCROWDED_NODES = 16  # assumed, see `crowding`
NODE_STEP_SECONDS = 4e-6  # of a ring step inside a node: NVLink and a kernel (assumed)
CPU_STEP_SECONDS = 5e-4  # half of an all-reduce of some KiB by Gloo over the loopback interface (as hardware.CPU)
DEFAULT_NODE_GBIT = 1600.0  # of a node: the network cards of a DGX A100
# GB/s of bus bandwidth of an all-reduce on 8 H200s, of 32 KiB, 64 KiB and so on to 16 GiB (ml-engineering).
_BUS = (
    *(1.44, 2.93, 5.73, 11.74, 23.94, 39.93, 64.53, 107.16, 155.53, 219.89),
    *(275.84, 346.51, 401.93, 436.15, 450.29, 463.58, 469.17, 473.1, 477.45, 482.26),
)
NODE_CURVE = tuple(rate / _BUS[-1] for rate in _BUS)
SMALLEST = MIB / 32  # payload of the curve's first point


@dataclass(frozen=True)
class Link:
    """A connection of a group of ranks: GB/s of bus bandwidth per rank, and seconds per ring step."""

    level: str
    bus_gb_per_s: float
    step_seconds: float


@dataclass(frozen=True)
class Level:
    """One level of a cluster's network.

    Attributes:
        name: node for the innermost level.
        size: GPUs that it connects; 0: all.
        measured: bus bandwidth in GB/s by the ranks of a group that fills its nodes, in ascending order; one entry
            holds for all sizes.
        node_gbit: nominal Gbit/s of a node into this level, where nothing is measured.
        latency_us: of one ring step; 0: the stack's constant.
    """

    name: str
    size: int = 0
    measured: tuple[tuple[int, float], ...] = ()
    node_gbit: float = 0
    latency_us: float = 0

    def bus_gb_per_s(self, ranks: int) -> float:
        """Interpolate between the measured numbers of ranks, linearly in their logarithms; the ends hold beyond."""
        below = [pair for pair in self.measured if pair[0] <= ranks] or self.measured[:1]
        above = [pair for pair in self.measured if pair[0] >= ranks] or self.measured[-1:]
        (low, start), (high, end) = below[-1], above[0]
        if low == high:
            return start
        share = math.log(ranks / low) / math.log(high / low)
        return start * (end / start) ** share


def levels_of(card: Gpu, gpus_per_node: int, node_gbit: float) -> tuple[Level, ...]:
    """Return the levels of machines without a cluster file: the GPU's own links, and a node's network cards."""
    inner = "host" if card.generation == "cpu" else "node"
    return Level(inner, gpus_per_node, ((1, card.bus_gb_per_s),)), Level("network", 0, node_gbit=node_gbit)


def link(
    levels: Sequence[Level], gpus_per_node: int, ranks: int, stride: int, network_share: float, step_seconds: float
) -> Link:
    """Find the link of a group of `ranks` ranks that are `stride` apart, while all such groups communicate at once.

    A group with one rank per node has an equal share of the node's cards with the node's other groups.

    Args:
        levels: from the inside outwards; the group uses the outermost one that it crosses.
        network_share: attained share of a nominal rate.
        step_seconds: of a ring step where the level has no latency.
    """
    span = (ranks - 1) * stride + 1
    level = next((candidate for candidate in levels[:-1] if candidate.size >= span), levels[-1])
    if level is levels[0] and span <= (level.size or gpus_per_node):
        is_host = level.name == "host"
        inside = CPU_STEP_SECONDS if is_host else NODE_STEP_SECONDS
        return Link("host" if is_host else "node", level.bus_gb_per_s(ranks), level.latency_us / 1e6 or inside)
    per_node = max(1, min(ranks, gpus_per_node // stride)) if stride < gpus_per_node else 1
    share = per_node / gpus_per_node  # of the node's cards, which its other groups use at the same time
    nominal = level.node_gbit / 8 * NIC_SHARE * network_share * crowding(ranks / per_node)
    rate = (level.bus_gb_per_s(ranks) if level.measured else nominal) * share
    # a ring across nodes also uses the links inside them
    rate = min(rate, levels[0].bus_gb_per_s(gpus_per_node))
    return Link(level.name, rate, level.latency_us / 1e6 or step_seconds)


def crowding(nodes: float) -> float:
    """Share of a network's rate that remains for a group over many nodes: the root of 16 over their number.

    The playbook's chart of EFA (256 MB, AWS p5) falls from 85 to 33 GB/s (all-reduce) and from 55 to 11 (all-gather)
    between 16 and 64 nodes, the latency of more ring steps included, which this share does not count.
    """
    return min(1.0, math.sqrt(UNCROWDED_NODES / nodes))


def ramp(payload_bytes: float) -> float:
    """Share of a node's peak bus bandwidth that a payload attains, by the curve measured on 8 H200s."""
    place = math.log2(max(payload_bytes, 1) / SMALLEST)
    if place <= 0:
        # latency decides below the measured sizes, so the rate falls with the size
        return NODE_CURVE[0] * 2**place
    below = int(place)
    if below + 1 >= len(NODE_CURVE):
        return 1.0
    return NODE_CURVE[below] + (NODE_CURVE[below + 1] - NODE_CURVE[below]) * (place - below)


# Bytes and seconds of collectives, ring algorithms.


def all_gather_volume(elements: float, ranks: int) -> float:
    """Elements that each rank sends (and receives): (N - 1) K / N; a reduce-scatter's, too."""
    return (ranks - 1) * elements / ranks


def one_way_volume(elements: float, ranks: int, link: Link) -> float:
    """Elements of an all-gather or a reduce-scatter, or of what takes as long.

    Between processes of one host, Gloo needs about as long for each of them as for an all-reduce of the same tensor: 9
    to 10, 16 to 19 and 13 to 14 ms for 16 MiB and two processes (AMD EPYC, torch 2.13.0, 2026-11-26).
    """
    return (all_reduce_volume if link.level == "host" else all_gather_volume)(elements, ranks)


def all_reduce_volume(elements: float, ranks: int) -> float:
    """Elements that each rank sends: 2 (N - 1) K / N, a reduce-scatter and an all-gather."""
    return 2 * all_gather_volume(elements, ranks)


def collective_seconds(volume_bytes: float, ranks: int, link: Link, payload_bytes: float | None = None) -> float:
    """Seconds to send a ring collective's volume per rank; `payload_bytes` of one call decides what rate is attained.

    Args:
        volume_bytes: all bytes that a rank sends.
        ranks: of the group.
        link: what the ring crosses.
        payload_bytes: whole tensor of one call, where the volume is sent in several; default: one call.
    """
    if ranks <= 1 or volume_bytes <= 0:
        return 0.0
    whole = payload_bytes or volume_bytes * ranks / (ranks - 1)
    # with its payload given, an all-reduce counts as two calls: its two passes around the ring
    calls = max(1.0, volume_bytes * ranks / (ranks - 1) / whole)
    rate = link.bus_gb_per_s * 1e9
    # The curve was measured inside a node. Between nodes the latency of the ring's steps alone gives the curve of 4
    # nodes of B200s (ml-engineering) within 22 %, with 7 us a step; a curve on top of it predicted the runs worse.
    if link.level == "node":
        rate *= ramp(whole)
    return volume_bytes / rate + calls * (ranks - 1) * link.step_seconds
