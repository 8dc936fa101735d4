"""Benchmark of a barrier: what it costs, and how late each rank comes to it after the same work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import distributed as dist

from samecurve.bench import printing

NAME = "barrier"
ROUNDS = 50
WIDTH = 256  # of the matrix product before each barrier
MOST_ROWS = 16


@dataclass(frozen=True)
class Arrival:
    """Times at which one rank comes to the barriers.

    Attributes:
        late_seconds: median time after the first rank.
        latest_seconds: the same in the worst round.
        last_share: share of rounds in which no rank came later.
    """

    rank: int
    late_seconds: float
    latest_seconds: float
    last_share: float


@dataclass(frozen=True)
class Barrier:
    """seconds: median time of a barrier after the last rank has come. arrivals: one per rank, in order."""

    seconds: float
    arrivals: list[Arrival]


def measure(device: torch.device, rounds: int = ROUNDS) -> Barrier:
    """Measure barriers after the same matrix product on each rank; to be called on all ranks."""
    operand = torch.randn(WIDTH, WIDTH, device=device)
    # NCCL's barrier would otherwise choose a device by the rank
    devices = [device.index] if device.type == "cuda" else None
    waits = torch.zeros(rounds + 1, dtype=torch.float64, device=device)
    for nth in range(rounds + 1):
        torch.mm(operand, operand)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        dist.barrier(device_ids=devices)
        waits[nth] = time.perf_counter() - began
    ranks = [torch.empty_like(waits) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, waits)
    return from_waits([rank[1:].tolist() for rank in ranks])  # the first barrier connects the ranks


def from_waits(waits: Sequence[Sequence[float]]) -> Barrier:
    """Derive arrivals from how long each rank waited, without a clock that all machines share.

    Ranks leave a barrier together, but for the time of its last messages. So who waited less came later by that much,
    and the last rank's wait is the cost of the barrier itself.

    Args:
        waits: seconds by rank and round.
    """
    rounds = list(zip(*waits, strict=True))
    arrivals = []
    for rank, own in enumerate(waits):
        late = [max(times) - wait for times, wait in zip(rounds, own, strict=True)]
        last = sum(wait == min(times) for times, wait in zip(rounds, own, strict=True))
        arrivals.append(Arrival(rank, median(late), max(late), last / len(rounds)))
    return Barrier(median(min(times) for times in rounds), arrivals)


def report(barrier: Barrier) -> None:
    """Print the arrivals, those that come latest if there are many."""
    shown = sorted(barrier.arrivals, key=lambda arrival: arrival.late_seconds, reverse=True)[:MOST_ROWS]
    rows = [
        [
            f"rank {arrival.rank}",
            f"{1e6 * arrival.late_seconds:,.1f}",
            f"{1e6 * arrival.latest_seconds:,.1f}",
            f"{100 * arrival.last_share:.0f} %",
        ]
        for arrival in sorted(shown, key=lambda arrival: arrival.rank)
    ]
    some = f", the latest {MOST_ROWS} of {len(barrier.arrivals)} ranks" if len(barrier.arrivals) > MOST_ROWS else ""
    title = f"barrier: {1e6 * barrier.seconds:,.1f} microseconds after the last rank has come{some}"
    printing.print_table(["after the same work", "microseconds late", "at most", "last of all"], rows, title)


def as_json(barrier: Barrier | None) -> dict | None:
    return None if barrier is None else asdict(barrier)
