"""Time and bandwidth of what processes send each other, over message sizes.

Bandwidths are those of nccl-tests (its doc/PERFORMANCE.md), so that numbers can be compared. The algorithm's is size /
time. The bus's is that times a factor which takes the number of processes n out of it, so that it can be held against
the hardware's: 2 (n - 1) / n for all_reduce; (n - 1) / n for all_gather, reduce_scatter, all_to_all, gather and
scatter; 1 for broadcast, reduce and send_recv. The size is that of the whole data: what all_gather and gather collect,
what reduce_scatter and scatter hand out, what each process gives to all_to_all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

FEWEST, MOST = 3, 200  # calls per size
_LACKING = re.compile(
    r"not (?:support|implement|offer)|unsupported|cannot be used|no backend type|is not available", re.IGNORECASE
)
# torch 2.13 has new names, and warns of those that 2.11 knows
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Buffers:
    """fp32 on this rank. whole: the size, in equal parts for all ranks; part: one of them. Each holds rank + 1."""

    def __init__(self, num_bytes: int, device: torch.device):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        each = max(1, num_bytes // 4 // self.world)
        self.whole = torch.full((each * self.world,), self.rank + 1.0, device=device)
        self.other, self.part = torch.zeros_like(self.whole), self.whole[:each].clone()

    @property
    def num_bytes(self) -> int:
        return 4 * self.whole.numel()

    def parts(self) -> list[Tensor] | None:
        """Of `other`, on the first rank."""
        return list(self.other.chunk(self.world)) if self.rank == 0 else None


@dataclass(frozen=True)
class Collective:
    """run: call it once and give the result. expected: (rank, n) -> what equal parts of the first call's result hold.

    None: this rank gets nothing.
    """

    factor: Callable[[int], float]
    run: Callable[[Buffers], Tensor]
    expected: Callable[[int, int], list[float] | None]


@dataclass(frozen=True)
class Timing:
    """name: the collective's. seconds: of one call, on the slowest rank. Bandwidths in 10^9 bytes per second."""

    name: str
    num_bytes: int
    seconds: float
    algorithm_gb_per_second: float
    bus_gb_per_second: float


def bandwidths(name: str, num_bytes: int, seconds: float, world_size: int) -> tuple[float, float]:
    """(algorithm's, bus's), in 10^9 bytes per second."""
    algorithm = num_bytes / seconds / 1e9
    return algorithm, algorithm * COLLECTIVES[name].factor(world_size)


def measure(
    names: Sequence[str], sizes: Sequence[int], device: torch.device, seconds: float
) -> Iterator[Timing | tuple[str, str]]:
    """On all ranks together. seconds: about how long each size of each collective is repeated.

    Yields (name, why) in place of a collective that the backend does not offer. Raises RuntimeError where a result is
    wrong.
    """
    for name in names:
        try:
            _check(name, Buffers(sizes[0], device))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if not _LACKING.search(str(error)):
                raise
            yield name, str(error).splitlines()[0]
            continue
        for size in sizes:
            buffers = Buffers(size, device)
            took = _seconds(COLLECTIVES[name], buffers, seconds)
            yield Timing(name, buffers.num_bytes, took, *bandwidths(name, buffers.num_bytes, took, buffers.world))


def _check(name: str, buffers: Buffers) -> None:
    collective = COLLECTIVES[name]
    found, expected = collective.run(buffers), collective.expected(buffers.rank, buffers.world)
    if expected is None:
        return
    wanted = torch.tensor(expected, device=found.device)[:, None]
    if not bool((found.view(len(expected), -1) == wanted).all()):
        raise RuntimeError(f"{name}: rank {buffers.rank} of {buffers.world} got {found}, wanted parts of {expected}")


def _seconds(collective: Collective, buffers: Buffers, seconds: float) -> float:
    """Of one call. The slowest rank's, because a step waits for it; so all ranks count the same calls, too."""
    collective.run(buffers)
    once = _repeated(collective, buffers, 1)
    return _repeated(collective, buffers, max(FEWEST, min(MOST, int(seconds / once))))


def _repeated(collective: Collective, buffers: Buffers, count: int) -> float:
    device = buffers.whole.device
    _slowest(0.0, device)  # all ranks begin together
    began = time.perf_counter()
    for _ in range(count):
        collective.run(buffers)
    _finish(device)
    return _slowest((time.perf_counter() - began) / count, device)


def _slowest(seconds: float, device: torch.device) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    """Each rank to the next, around a ring, all at once."""
    ahead, behind = (buffers.rank + 1) % buffers.world, (buffers.rank - 1) % buffers.world
    sent = dist.P2POp(dist.isend, buffers.whole, ahead)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, buffers.other, behind)]):
        work.wait()
    return buffers.other


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
    "gather": Collective(lambda n: (n - 1) / n, _gather, _first(_each)),
    "all_gather": Collective(lambda n: (n - 1) / n, _all_gather, _each),
    "scatter": Collective(lambda n: (n - 1) / n, _scatter, lambda rank, n: [1.0]),
    "reduce_scatter": Collective(lambda n: (n - 1) / n, _reduce_scatter, _sum),
    "all_to_all": Collective(lambda n: (n - 1) / n, _all_to_all, _each),
    "send_recv": Collective(lambda n: 1, _send_recv, lambda rank, n: [(rank - 1) % n + 1.0]),
}
