"""Ring all-reduce: the sum of a tensor over n ranks, with 2 (n - 1) K / n bytes sent per rank for K bytes of data.

Each rank only ever sends to the next one (rank + 1) and receives from the one before. The tensor is cut into n parts.

1. reduce-scatter, n - 1 rounds: each part travels around the ring, and every rank adds its own values.
   Afterwards rank r holds part r of the sum, and nothing else of it.
2. all-gather, n - 1 rounds: the finished parts travel around the ring once more, and every rank keeps a copy.

Each round sends K / n bytes, so that the time hardly depends on n; sending everything to one rank would cost that rank
(n - 1) K bytes. All later examples use these three functions. All-reduce = reduce-scatter + all-gather is the one
identity to remember: ZeRO and sequence parallelism only move work in between the two halves.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

import torch
from torch import Tensor
from torch import distributed as dist
from wire import bytes_sent, exchange, report, start


def neighbours() -> tuple[int, int, int, int]:
    """Return (rank, number of ranks, the next rank, the rank before)."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, n, (rank + 1) % n, (rank - 1) % n


def reduce_scatter(whole: Tensor) -> Tensor:
    """whole: (n * k, ...), another one on each rank. Returns rows r * k to (r + 1) * k of the sum, on rank r."""
    rank, n, after, before = neighbours()
    parts = list(whole.chunk(n))
    for step in range(n - 1):  # part i leaves rank i + 1 first, and comes to its owner i last
        sent, received = (rank - 1 - step) % n, (rank - 2 - step) % n
        parts[received] = parts[received] + exchange(parts[sent], after, before)
    return parts[rank]


def all_gather(part: Tensor) -> Tensor:
    """part: (k, ...), another one on each rank. Returns all of them, (n * k, ...), in the order of ranks."""
    rank, n, after, before = neighbours()
    parts = [part] * n
    for step in range(n - 1):  # what has just come is what leaves next
        sent, received = (rank - step) % n, (rank - 1 - step) % n
        parts[received] = exchange(parts[sent], after, before)
    return torch.cat(parts)


def all_reduce(tensor: Tensor) -> Tensor:
    """Return the sum over ranks, in the tensor's shape; zeros fill the last part where n does not divide."""
    n = dist.get_world_size()
    flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n))
    return all_gather(reduce_scatter(flat))[: tensor.numel()].view_as(tensor)


def main() -> None:
    rank, n = start()
    everyone = torch.randn(n, 120)  # row r is the tensor of rank r
    mine = everyone[rank].clone()
    total = all_reduce(mine)
    num_bytes = mine.numel() * mine.element_size()
    assert bytes_sent() == 2 * (n - 1) * num_bytes // n, "the formula in the first line"
    library = mine.clone()
    dist.all_reduce(library)
    holds = f"{num_bytes} bytes of its own, then their sum over {n} ranks"
    report("ring all-reduce", holds, [total, library], [everyone.sum(0)] * 2)


if __name__ == "__main__":
    main()
