"""Links of a cluster by level, and which of them a group of ranks communicates over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.planner.hardware import NIC_SHARE, NODE_STEP_SECONDS, Link, crowding, ramp


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
    # The curve was measured inside a node. Between nodes the latency of the ring's steps alone gives hardware.json's
    # curve of 4 nodes within 22 %, with 7 us a step; a curve on top of it predicted the public runs worse.
    if link.level == "node":
        rate *= ramp(whole)
    return volume_bytes / rate + calls * (ranks - 1) * link.step_seconds
