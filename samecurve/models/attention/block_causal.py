"""Causal attention on a CPU in blocks of queries, as a custom torch operator.

Each block uses only the keys that are visible to at least one of its queries. The forward pass is torch's own attention
(FlashAttention, Dao et al., 2022, arXiv:2205.14135). The backward pass recomputes probabilities, too, so stored
activations grow with the length of a row instead of its square, but in matrix products that cover a block: in bf16
those are faster than torch's backward pass. Scores are rounded to the inputs' dtype there, as in eager attention.

Rows with equal documents, such as those of one long text, are computed together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

BLOCK, SMALLEST = 256, 64
"""Maximum and minimum queries per block.

Smaller blocks would compute fewer hidden scores, but in matrices too small to be fast.
"""
SCORES_BYTES = 2**22
"""Size of a block's scores beyond which rows are differentiated in turns."""


@torch.library.custom_op("samecurve::varlen_attention", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float) -> Tensor:
    """Compute causal attention within documents.

    Args:
        query: (batch, heads, sequence, width).
        key: (batch, key heads, sequence, width); the number of key heads divides that of heads.
        value: in the shape of `key`.
        first: int64 (batch, 1, sequence, 1), index of the first key visible to each query; the last one is its own.
        scale: factor of the scores.

    Returns:
        (batch, sequence, heads, width).
    """
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    for rows, starts in _alike(first):
        for block in _blocks(starts):
            queries = _together(query[rows, :, block.at], key.shape[1])
            keys, values = (x[rows, :, block.seen] for x in (key, value))
            attended = nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=block.bias(queries), scale=scale
            )
            _write(output[rows, block.at].transpose(1, 2), attended)
    return output


@torch.library.custom_op("samecurve::varlen_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value, with sums over blocks in fp32.

    `gradient` is (batch, sequence, heads, width).
    """
    of_output = gradient.transpose(1, 2)
    of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
    for alike, starts in _alike(first):
        blocks = list(_blocks(starts))
        scores_of_row = query.shape[1] * max(block.num_scores for block in blocks)
        at_once = max(1, SCORES_BYTES // (scores_of_row * query.element_size()))
        for start in range(alike.start, alike.stop, at_once):
            rows = slice(start, min(start + at_once, alike.stop))
            memory = query.new_empty(2, (rows.stop - rows.start) * scores_of_row)
            per_key, per_value = (torch.zeros(x[rows].shape, device=x.device) for x in (key, value))
            for block in blocks:
                parts = block.gradients(of_output[rows], query[rows], key[rows], value[rows], scale, memory)
                _write(of_query[rows, :, block.at], parts[0])
                for total, part in zip((per_key, per_value), parts[1:], strict=True):
                    place = total[:, :, block.seen]
                    place.add_(part.view(place.shape))
            of_key[rows], of_value[rows] = per_key, per_value
    return of_query, of_key, of_value


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float) -> Tensor:
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)


@_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.scale = inputs[4]


def _differentiate(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.samecurve.varlen_attention_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


attend.register_autograd(_differentiate, setup_context=_keep)
OPERATOR = torch.ops.samecurve.varlen_attention.default


@register_flop_formula(torch.ops.samecurve.varlen_attention)
def _forward_flops(query: torch.Size, *_, **__) -> int:
    """Count FLOPs over the full square, as torch does for its own attention."""
    batch, heads, length, width = query
    return 4 * batch * heads * length**2 * width


@register_flop_formula(torch.ops.samecurve.varlen_attention_backward)
def _backward_flops(_gradient: torch.Size, query: torch.Size, *_, **__) -> int:
    return 5 * _forward_flops(query) // 2


class _Block(NamedTuple):
    """Consecutive queries of rows with equal documents, and the keys visible to at least one of them.

    Attributes:
        at: range of the queries.
        seen: range of the keys.
        starts: the first visible key of each query.
    """

    at: slice
    seen: slice
    starts: list[int]

    @property
    def num_scores(self) -> int:
        """Number of scores of a head."""
        return (self.at.stop - self.at.start) * (self.seen.stop - self.seen.start)

    def bias(self, queries: Tensor) -> Tensor:
        """Return what is added to the scores of `queries`, (..., queries of all heads that share a key head, width)."""
        num_queries, device = len(self.starts), queries.device
        bias = _causal(num_queries, queries.dtype, device)
        bias = nn.functional.pad(bias, (self.at.start - self.seen.start, 0))
        if self.starts[-1] > self.seen.start:  # else every key before a query is visible
            first = torch.tensor(self.starts, device=device)[:, None]
            hidden = torch.arange(self.seen.start, self.seen.stop, device=device) < first
            bias = bias.masked_fill(hidden, float("-inf"))
        groups = queries.shape[-2] // num_queries
        return bias if groups == 1 else bias.repeat(groups, 1)

    def gradients(
        self, of_output: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, memory: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of this block's queries, keys and values.

        Args:
            of_output: (rows, heads, sequence, width), as `query`.
            memory: for the scores and the probabilities of all rows, (2, at least so many). Blocks share it, and the
                processor's caches then hold it.

        Returns:
            Three of (rows * key heads, tokens, width); the queries' are those of all heads that share a key head.
        """
        given, queries = (_for_products(_together(x[:, :, self.at], key.shape[1])) for x in (of_output, query))
        keys, values = (_for_products(x[:, :, self.seen]) for x in (key, value))
        shape = torch.Size((*queries.shape[:2], keys.shape[1]))
        scores, probabilities = (x[: shape.numel()].view(shape) for x in memory)
        torch.baddbmm(self.bias(queries), queries, keys.transpose(1, 2), alpha=scale, out=scores)
        torch._softmax(scores, -1, False, out=probabilities)
        of_value = torch.bmm(probabilities.transpose(1, 2), given)
        torch.bmm(given, values.transpose(1, 2), out=scores)
        torch._softmax_backward_data(scores, probabilities, -1, scores.dtype, grad_input=scores)
        of_query = torch.baddbmm(queries, scores, keys, beta=0, alpha=scale)
        of_key = torch.baddbmm(keys, scores.transpose(1, 2), queries, beta=0, alpha=scale)
        return of_query, of_key, of_value


def _together(part: Tensor, key_heads: int) -> Tensor:
    """Reshape (rows, heads, tokens, width) to (rows, key heads, tokens of all heads that share a key head, width).

    Heads that share a key head then need one product and no copies of keys.
    """
    return part.reshape(len(part), key_heads, -1, part.shape[-1])


def _for_products(part: Tensor) -> Tensor:
    """Reshape (rows, key heads, tokens, width) to (rows * key heads, tokens, width).

    Contiguous, because otherwise each product would make its own copy.
    """
    return part.flatten(0, 1).contiguous()


def _write(place: Tensor, part: Tensor) -> None:
    """Write a part that `_together` or `_for_products` has reshaped to its place, (rows, heads, tokens, width)."""
    place.copy_(part.reshape(place.shape))


def _alike(first: Tensor) -> Iterator[tuple[slice, list[int]]]:
    """Yield consecutive rows with equal documents, and the first visible key of each of their queries."""
    stop = 0
    for starts, rows in groupby(first[:, 0, :, 0].tolist()):
        start, stop = stop, stop + len(list(rows))
        yield slice(start, stop), starts


def _blocks(starts: list[int]) -> Iterator[_Block]:
    """Split a row into blocks. A block ends at a document's end if it then has at least SMALLEST queries."""
    begins, ends = [i for i, first in enumerate(starts) if i == first], [0]
    while ends[-1] < len(starts):
        place = bisect_left(begins, ends[-1] + SMALLEST)
        ends.append(min(ends[-1] + BLOCK, begins[place] if place < len(begins) else len(starts)))
    for start, stop in pairwise(ends):
        yield _Block(slice(start, stop), slice(starts[start], stop), starts[start:stop])


@lru_cache(maxsize=BLOCK)
def _causal(num_queries: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Causal bias between the block's queries and the keys at the same positions, (num_queries, num_queries)."""
    return torch.full((num_queries, num_queries), float("-inf"), dtype=dtype, device=device).triu(1)
