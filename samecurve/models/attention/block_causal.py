"""Causal attention on a CPU in blocks of queries, as a custom torch operator.

Each block uses only the keys that are visible to at least one of its queries. As in FlashAttention (Dao et al., 2022,
arXiv:2205.14135) the backward pass recomputes probabilities, so stored activations grow with the length of a row
instead of its square. (Storing the probabilities of a row of 512 tokens made a step of benchmarks/speed/pretrain.yaml
only 1 % faster: reading them is hardly faster than computing them.) Scores are rounded to the inputs' dtype, as in
eager attention.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

BLOCK, SMALLEST = 256, 64
"""Maximum and minimum queries per block.

Smaller blocks would compute fewer hidden scores, but in matrices too small to be fast.
"""


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
    for row, parts in enumerate(zip(query, key, value, first[:, 0, :, 0], strict=True)):
        for block in _blocks(*parts):
            attended = torch.bmm(block.probabilities(scale), block.value)
            output[row, block.at] = _separate(attended, query.shape[1]).transpose(0, 1)
    return output


@torch.library.custom_op("samecurve::varlen_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value, with sums over blocks in fp32.

    `gradient` is (batch, sequence, heads, width).
    """
    of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
    per_key, per_value = (torch.zeros(x.shape[1:], device=x.device) for x in (key, value))
    for row, parts in enumerate(zip(query, key, value, first[:, 0, :, 0], strict=True)):
        for block in _blocks(*parts):
            given = _together(gradient[row].transpose(0, 1)[:, block.at], key.shape[1])
            probabilities = block.probabilities(scale)
            per_value[:, block.seen].add_(torch.bmm(probabilities.transpose(1, 2), given))
            of_probabilities = torch.bmm(given, block.value.transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype)
            of_query[row, :, block.at] = _separate(torch.bmm(of_scores, block.key).mul_(scale), query.shape[1])
            per_key[:, block.seen].add_(torch.bmm(of_scores.transpose(1, 2), block.query))
        of_key[row], of_value[row] = per_key.mul_(scale), per_value
        per_key.zero_()
        per_value.zero_()
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
    """Consecutive queries of a row and the keys visible to at least one of them.

    Attributes:
        at: range of the queries.
        seen: range of the keys.
        query: (key heads, queries of all heads that share a key head, width).
        key: (key heads, keys, width).
        value: (key heads, keys, width).
        bias: (queries of all heads that share a key head, keys), added to the scores.
    """

    at: slice
    seen: slice
    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor

    def probabilities(self, scale: float) -> Tensor:
        scores = torch.baddbmm(self.bias, self.query, self.key.transpose(1, 2), alpha=scale)
        return torch.softmax(scores, dim=-1)


def _together(part: Tensor, key_heads: int) -> Tensor:
    """Reshape (heads, tokens, width) to (key heads, tokens of all heads that share a key head, width).

    Heads that share a key head then need one product and no copies of keys. The result is contiguous, because otherwise
    each product would make its own copy.
    """
    return part.reshape(key_heads, -1, part.shape[-1]).contiguous()


def _separate(part: Tensor, heads: int) -> Tensor:
    return part.view(heads, -1, part.shape[-1])


def _blocks(query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> Iterator[_Block]:
    """Split one row into blocks. `query`, `key` and `value` are (heads, sequence, width), `first` is (sequence,).

    A block ends at a document's end if it then has at least SMALLEST queries.
    """
    starts = first.tolist()
    begins, stop = [i for i, first_key in enumerate(starts) if i == first_key], 0
    while stop < len(starts):
        start, place = stop, bisect_left(begins, stop + SMALLEST)
        stop = min(start + BLOCK, begins[place] if place < len(begins) else len(starts))
        at, seen = slice(start, stop), slice(starts[start], stop)
        queries, keys = _together(query[:, at], len(key)), key[:, seen].contiguous()
        bias = _causal(stop - start, query.dtype, query.device)
        bias = nn.functional.pad(bias, (keys.shape[1] - len(bias), 0))
        if starts[stop - 1] > seen.start:  # else the block lies in one document, and every key before it is visible
            hidden = torch.arange(seen.start, seen.stop, device=first.device) < first[at, None]
            bias = bias.masked_fill(hidden, float("-inf"))
        if len(query) > len(key):
            bias = bias.repeat(len(query) // len(key), 1)
        yield _Block(at, seen, queries, keys, value[:, seen].contiguous(), bias)


@lru_cache(maxsize=BLOCK)
def _causal(num_queries: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Causal bias between the block's queries and the keys at the same positions, (num_queries, num_queries)."""
    return torch.full((num_queries, num_queries), float("-inf"), dtype=dtype, device=device).triu(1)
