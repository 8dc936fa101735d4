"""Links of a cluster by level, and which of them a group of ranks communicates over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.planner.hardware import NIC_SHARE, NODE_STEP_SECONDS, Link, crowding


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


def link(
    levels: Sequence[Level], gpus_per_node: int, ranks: int, stride: int, network_share: float, step_seconds: float
) -> Link:
    """Find the link of a group of `ranks` ranks that are `stride` apart, while all such groups communicate at once.

    Args:
        levels: from the inside outwards; the group uses the outermost one that it crosses.
        network_share: attained share of a nominal rate.
        step_seconds: of a ring step where the level has no latency.
    """
    span = (ranks - 1) * stride + 1
    level = next((each for each in levels[:-1] if each.size >= span), levels[-1])
    inside = level is levels[0] and span <= (level.size or gpus_per_node)
    latency = level.latency_us / 1e6 or (NODE_STEP_SECONDS if inside else step_seconds)
    if inside:
        return Link("node", level.bus_gb_per_s(ranks), latency)
    per_node = max(1, min(ranks, gpus_per_node // stride)) if stride < gpus_per_node else 1
    share = per_node / gpus_per_node  # of the node's cards, which its other groups use at the same time
    nominal = level.node_gbit / 8 * NIC_SHARE * network_share * crowding(ranks / per_node)
    rate = (level.bus_gb_per_s(ranks) if level.measured else nominal) * share
    # a ring across nodes also uses the links inside them
    return Link(level.name, min(rate, levels[0].bus_gb_per_s(gpus_per_node)), latency)
