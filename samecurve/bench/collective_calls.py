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

    def parts(self, name: str) -> list[Tensor] | None:
        """Split a buffer into one part per rank; None on all ranks but 0."""
        return list(getattr(self, name).chunk(self.world)) if self.rank == 0 else None


@dataclass(frozen=True)
class Collective:
    """A collective to measure.

    Attributes:
        factor: maps the number of ranks to the bus bandwidth factor.
        call: makes one call.
        result: name of the buffer that it fills.
        expected: maps (rank, number of ranks) to the values in equal parts of the first call's result; None for a rank
            that receives nothing.
    """

    factor: Callable[[int], float]
    call: Callable[[Buffers], object]
    result: str
    expected: Callable[[int, int], list[float] | None]

    def run(self, buffers: Buffers) -> Tensor:
        """Make one call and return the result."""
        self.call(buffers)
        return getattr(buffers, self.result)


def _ring_all_reduce(buffers: Buffers) -> None:
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
    "broadcast": Collective(lambda n: 1, lambda b: dist.broadcast(b.whole, src=0), "whole", lambda rank, n: [1.0]),
    "reduce": Collective(lambda n: 1, lambda b: dist.reduce(b.whole, dst=0), "whole", _first(_sum)),
    "all_reduce": Collective(lambda n: 2 * (n - 1) / n, lambda b: dist.all_reduce(b.whole), "whole", _sum),
    "ring_all_reduce": Collective(lambda n: 2 * (n - 1) / n, _ring_all_reduce, "whole", _sum),
    "gather": Collective(
        lambda n: (n - 1) / n, lambda b: dist.gather(b.part, b.parts("other"), dst=0), "other", _first(_each)
    ),
    "all_gather": Collective(lambda n: (n - 1) / n, lambda b: _ALL_GATHER(b.other, b.part), "other", _each),
    "scatter": Collective(
        lambda n: (n - 1) / n, lambda b: dist.scatter(b.part, b.parts("whole"), src=0), "part", lambda rank, n: [1.0]
    ),
    "reduce_scatter": Collective(lambda n: (n - 1) / n, lambda b: _REDUCE_SCATTER(b.part, b.whole), "part", _sum),
    "all_to_all": Collective(lambda n: (n - 1) / n, lambda b: dist.all_to_all_single(b.other, b.whole), "other", _each),
    # from each rank to the next one around a ring, all at once
    "send_recv": Collective(
        lambda n: 1, lambda b: _pass_on(b, b.whole, b.other), "other", lambda rank, n: [(rank - 1) % n + 1.0]
    ),
}
