"""Causal attention within documents whose keys and values travel round a ring of ranks (arXiv:2310.01889).

Each rank has its queries all the time, and the keys and values of one rank after the other. Blocks are merged by their
log-sum-exp, an online softmax. In the backward pass keys and values travel once more, followed by their gradients, to
which each rank adds its own; the last one sends them home. So a rank never has more than two ranks' keys, and sends
n - 1 blocks of keys and values forward, as many backward, and as many of their gradients. While blocks travel, the ones
before are computed.

Blocks are computed in tiles of queries and keys, and tiles of which no query sees a key are left out. Scores are
rounded to the inputs' dtype, as in eager attention; all sums are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from samecurve.models.attention import head_tail

QUERIES, KEYS = 256, 2048
"""Queries and keys of a tile: 2 MiB of fp32 scores for each head and row."""
_HIDDEN = -1e30  # finite: a query that has seen no key yet has weights that the first visible key makes zero


@dataclass(frozen=True)
class RingMask:
    """Visible keys of a rank's queries, computed once for all layers.

    Attributes:
        first: int64 (rows, 1, own tokens, 1), place in the row of the first visible key; the last one is the query's
            own.
        bounds: for each tile of queries the smallest and the largest of `first` over all rows.
    """

    first: Tensor
    bounds: list[list[int]]

    @classmethod
    def of(cls, first: Tensor) -> RingMask:
        """Build it from `first`, (rows, own tokens), of both chunks. Synchronizes with the device."""
        tiles = [tile for chunk in first.chunk(2, dim=1) for tile in chunk.split(QUERIES, dim=1)]
        return cls(first[:, None, :, None], torch.stack([torch.stack(tile.aminmax()) for tile in tiles]).tolist())


def attend(query: Tensor, key: Tensor, value: Tensor, mask: RingMask, scale: float, group: dist.ProcessGroup) -> Tensor:
    """Compute attention of the rank's queries to the keys of all ranks of the group.

    Args:
        query: (rows, heads, own tokens, width), of the rank's head_tail.chunks.
        key: (rows, key heads, own tokens, width); the number of key heads divides that of heads.
        value: in the shape of `key`.
        mask: of the rank's queries.
        scale: factor of the scores.
        group: ranks in the order of their parts.

    Returns:
        (rows, own tokens, heads, width).
    """
    grouped = query.unflatten(1, (key.shape[1], -1))
    output = _Ring.apply(grouped, torch.stack([key, value]), mask, scale, group)
    return output.flatten(1, 2).transpose(1, 2)


class _Ring(torch.autograd.Function):
    """Of queries (rows, key heads, heads of each, own tokens, width) and blocks (2, rows, key heads, own tokens, width)
    of keys and values."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, block: Tensor, mask: RingMask, scale: float, group: dist.ProcessGroup
    ) -> Tensor:
        output = torch.zeros(query.shape, device=query.device)
        total = torch.full((*query.shape[:-1], 1), _HIDDEN, device=query.device)
        for source, (key, value) in _visits(block, group):
            for tile in _tiles(mask, group, source):
                scores = tile.scores(query, key, scale)
                before = total[..., tile.at, :]
                after = torch.logaddexp(before, scores.logsumexp(-1, keepdim=True))
                attended = _product(scores.sub_(after).exp_(), value[:, :, tile.seen])
                output[..., tile.at, :] = output[..., tile.at, :] * (before - after).exp_() + attended
                total[..., tile.at, :] = after
        output = output.to(query.dtype)
        ctx.save_for_backward(query, block, output, total)
        ctx.others = mask, scale, group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, own, output, total = ctx.saved_tensors
        mask, scale, group = ctx.others
        of_query = torch.zeros(query.shape, device=query.device)
        # what the softmax's gradient subtracts: a sum over all keys, here without waiting for those of other ranks
        inner = (gradient.float() * output).sum(-1, keepdim=True)
        of_own, arriving = torch.zeros(own.shape, device=own.device), None
        for source, (key, value) in _visits(own, group):
            of_block = of_own if source == group.rank() else torch.zeros_like(of_own)
            of_key, of_value = of_block
            for tile in _tiles(mask, group, source):
                weights = tile.scores(query, key, scale).sub_(total[..., tile.at, :]).exp_()
                given = gradient[..., tile.at, :]
                of_scores = _product(given, value[:, :, tile.seen].mT).float().sub_(inner[..., tile.at, :])
                of_scores.mul_(weights).mul_(scale)
                of_query[..., tile.at, :] += _product(of_scores, key[:, :, tile.seen])
                of_key[:, :, tile.seen] += _summed_product(of_scores, query[..., tile.at, :])
                of_value[:, :, tile.seen] += _summed_product(weights, given)
            if source != group.rank():
                of_block = of_block.add_(arriving()) if arriving else of_block
                arriving = _send_on(of_block, group)
        of_own = of_own.add_(arriving()) if arriving else of_own
        return of_query.to(query.dtype), of_own.to(own.dtype), None, None, None


class _Tile(NamedTuple):
    """Some of the rank's queries and some of a block's keys.

    Attributes:
        at: range of the queries among the rank's.
        seen: range of the keys among the block's.
        hidden: bool (rows, 1, 1, queries, keys), the keys that a query does not see; None: no key is hidden.
    """

    at: slice
    seen: slice
    hidden: Tensor | None

    def scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Return fp32 (rows, key heads, heads of each, queries, keys)."""
        products = _product(query[..., self.at, :], key[:, :, self.seen].mT).float().mul_(scale)
        return products if self.hidden is None else products.masked_fill_(self.hidden, _HIDDEN)


def _tiles(mask: RingMask, group: dist.ProcessGroup, source: int) -> Iterator[_Tile]:
    """Yield the tiles of the rank's queries and the block of rank `source` in which a query sees a key."""
    size, length = group.size(), mask.first.shape[2] // 2
    spans = _spans(group.rank(), size, length, QUERIES)
    for (at, start), (lowest, highest) in zip(spans, mask.bounds, strict=True):
        queries = range(start, start + at.stop - at.start)
        for block, place in _spans(source, size, length, KEYS):
            keys = range(max(lowest, place), min(queries.stop, place + block.stop - block.start))
            if not keys:
                continue
            hidden, first = None, mask.first[:, :, at]
            if highest > keys.start or keys.stop - 1 > queries.start:
                own = torch.arange(queries.start, queries.stop, device=first.device)[:, None]
                others = torch.arange(keys.start, keys.stop, device=first.device)
                hidden = ((others > own) | (others < first))[:, None]
            moved = place - block.start
            yield _Tile(at, slice(keys.start - moved, keys.stop - moved), hidden)


def _spans(index: int, count: int, length: int, step: int) -> Iterator[tuple[slice, int]]:
    """Yield (range of up to `step` tokens in part `index`, place in the row of the first one); `length`: of a chunk."""
    for half, chunk in enumerate(head_tail.chunks(index, count)):
        for start in range(0, length, step):
            yield slice(half * length + start, half * length + min(start + step, length)), chunk * length + start


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply (rows, key heads, heads of each, n, m) by (rows, key heads, m, k), shared by the heads of a key head."""
    return (left.to(right.dtype).flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


def _summed_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the transposed (rows, key heads, heads of each, n, m) by (..., n, k), summed over the heads."""
    return left.to(right.dtype).flatten(2, 3).mT @ right.flatten(2, 3)


def _visits(block: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank that it is from, block) for the rank's own block and then those of all others, as they arrive."""
    rank, size = group.rank(), group.size()
    for step in range(size):
        following = _send_on(block, group) if step < size - 1 else None
        yield (rank - step) % size, block
        block = following() if following else block


def _send_on(tensor: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Send a tensor to the next rank; return a function that waits for the one from the rank before."""
    rank, size = group.rank(), group.size()
    received = torch.empty_like(tensor)
    sends = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size)
    receives = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
    works = dist.batch_isend_irecv([sends, receives])

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait
