"""Definitions of the measured collectives: the call, the bus bandwidth factor, and the expected result."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

# torch 2.13 has new names and warns about the names of 2.11.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# a missing collective and a failing one raise the same classes, so that the message decides
_UNSUPPORTED = re.compile(
    r"not (?:support|implement|offer)|unsupported|cannot be used|no backend type|is not available", re.IGNORECASE
)


def is_unsupported(error: Exception) -> bool:
    """Tell whether a backend's error says that it lacks the collective."""
    return bool(_UNSUPPORTED.search(str(error)))


class Buffers:
    """The fp32 message buffers of this rank, filled with rank + 1.

    Attributes:
        whole: `num_bytes` in total (rounded), divisible into equal parts for all ranks.
        other: a second buffer of the same size, for results.
        part: a buffer of the size of one part.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        part_length = max(1, num_bytes // 4 // self.world)
        self.whole = torch.full((part_length * self.world,), self.rank + 1.0, device=device)
        self.other, self.part = torch.zeros_like(self.whole), self.whole[:part_length].clone()

    @property
    def num_bytes(self) -> int:
        return 4 * self.whole.numel()

    def parts(self) -> list[Tensor] | None:
        """Split `other` into one part per rank; None on all ranks but 0."""
        return list(self.other.chunk(self.world)) if self.rank == 0 else None


@dataclass(frozen=True)
class Collective:
    """A collective to measure.

    Attributes:
        factor: maps the number of ranks to the bus bandwidth factor.
        run: makes one call and returns the result.
        expected: maps (rank, number of ranks) to the values in equal parts of the first call's result; None for a rank
            that receives nothing.
    """

    factor: Callable[[int], float]
    run: Callable[[Buffers], Tensor]
    expected: Callable[[int, int], list[float] | None]


def _broadcast(buffers: Buffers) -> Tensor:
    dist.broadcast(buffers.whole, src=0)
    return buffers.whole


def _reduce(buffers: Buffers) -> Tensor:
    dist.reduce(buffers.whole, dst=0)
    return buffers.whole


def _all_reduce(buffers: Buffers) -> Tensor:
    dist.all_reduce(buffers.whole)
    return buffers.whole


def _gather(buffers: Buffers) -> Tensor:
    dist.gather(buffers.part, buffers.parts(), dst=0)
    return buffers.other


def _all_gather(buffers: Buffers) -> Tensor:
    _ALL_GATHER(buffers.other, buffers.part)
    return buffers.other


def _scatter(buffers: Buffers) -> Tensor:
    dist.scatter(buffers.part, list(buffers.whole.chunk(buffers.world)) if buffers.rank == 0 else None, src=0)
    return buffers.part


def _reduce_scatter(buffers: Buffers) -> Tensor:
    _REDUCE_SCATTER(buffers.part, buffers.whole)
    return buffers.part


def _all_to_all(buffers: Buffers) -> Tensor:
    dist.all_to_all_single(buffers.other, buffers.whole)
    return buffers.other


def _send_recv(buffers: Buffers) -> Tensor:
    """Send from each rank to the next one around a ring, all at once."""
    _pass_on(buffers, buffers.whole, buffers.other)
    return buffers.other


def _ring_all_reduce(buffers: Buffers) -> Tensor:
    """Sum as all_reduce does, by n - 1 rounds of reduce-scatter and n - 1 of all-gather around a ring.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. Each rank sends
    2 (n - 1) / n of the data.
    """
    rank, n = buffers.rank, buffers.world
    parts, arriving = buffers.whole.chunk(n), buffers.other.chunk(n)[0]
    for nth in range(2 * (n - 1)):  # what has arrived in a round leaves in the next one
        sent, received = parts[(rank - nth) % n], parts[(rank - nth - 1) % n]
        if nth < n - 1:
            _pass_on(buffers, sent, arriving)
            received += arriving
        else:
            _pass_on(buffers, sent, received)
    return buffers.whole


def _pass_on(buffers: Buffers, sent: Tensor, received: Tensor) -> None:
    """Send to the next rank while receiving from the one before."""
    ahead, behind = (buffers.rank + 1) % buffers.world, (buffers.rank - 1) % buffers.world
    sending = dist.P2POp(dist.isend, sent, ahead)
    for work in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, behind)]):
        work.wait()


def _sum(rank: int, n: int) -> list[float]:
    return [n * (n + 1) / 2]


def _each(rank: int, n: int) -> list[float]:
    return [other + 1.0 for other in range(n)]


def _first(expected: Callable[[int, int], list[float]]) -> Callable[[int, int], list[float] | None]:
    return lambda rank, n: expected(rank, n) if rank == 0 else None


COLLECTIVES = {
    "broadcast": Collective(lambda n: 1, _broadcast, lambda rank, n: [1.0]),
    "reduce": Collective(lambda n: 1, _reduce, _first(_sum)),
    "all_reduce": Collective(lambda n: 2 * (n - 1) / n, _all_reduce, _sum),
    "ring_all_reduce": Collective(lambda n: 2 * (n - 1) / n, _ring_all_reduce, _sum),
    "gather": Collective(lambda n: (n - 1) / n, _gather, _first(_each)),
    "all_gather": Collective(lambda n: (n - 1) / n, _all_gather, _each),
    "scatter": Collective(lambda n: (n - 1) / n, _scatter, lambda rank, n: [1.0]),
    "reduce_scatter": Collective(lambda n: (n - 1) / n, _reduce_scatter, _sum),
    "all_to_all": Collective(lambda n: (n - 1) / n, _all_to_all, _each),
    "send_recv": Collective(lambda n: 1, _send_recv, lambda rank, n: [(rank - 1) % n + 1.0]),
}
