"""Bytes and seconds of collectives, ring algorithms."""

from __future__ import annotations

from samecurve.planner.hardware import Link, ramp


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


def seconds(volume_bytes: float, ranks: int, link: Link, payload_bytes: float | None = None) -> float:
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
