"""Causal attention document by document, in plain matrix products and without a mask: `model.attention: varlen`.

torch's own attention on a CPU computes the scores that a mask then hides, and in bf16 stays far below the speed of its
matrix products. Here each block of queries meets only the keys that some of it may see. As in FlashAttention (Dao et
al., 2022, arXiv:2205.14135) probabilities are computed again for the backward pass, so what is kept grows with the
length of a row and not with its square. Scores are rounded to the inputs' dtype, as in eager attention.

Importing it registers the name with transformers; what its models take for a mask is then `first_keys`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function

NAME = "varlen"
BLOCK, SMALLEST = 256, 64
"""Queries. Fewer would compute less that is hidden, in matrices too small to be fast."""


def first_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> Tensor:
    """int64 (batch_size, 1, sequence_length, 1): each query sees the keys from this one to itself.

    mask_function: of (row, head, query, key), true over one stretch that ends with the query, which is then found by
    bisection: causal masks, their documents and their sliding windows are such. Padding after the last token needs
    nothing, for no token sees it. Raises ValueError for keys from a cache.
    """
    if (q_length, q_offset, kv_offset) != (kv_length, 0, 0):
        raise ValueError("varlen attention takes whole rows, without a cache of keys: pass use_cache=False")
    if attention_mask is not None:
        mask_function = and_masks(mask_function, padding_mask_function(attention_mask))
    rows = torch.arange(batch_size, device=device)[:, None]
    queries = torch.arange(q_length, device=device)[None, :]
    head = torch.zeros((), dtype=torch.long, device=device)
    lowest, highest = torch.zeros_like(queries).expand(batch_size, -1), queries.expand(batch_size, -1)
    for _ in range((q_length - 1).bit_length()):
        middle = (lowest + highest) // 2
        seen = mask_function(rows, head, queries, middle)
        lowest, highest = torch.where(seen, lowest, torch.minimum(middle + 1, highest)), highest.where(~seen, middle)
    return highest[:, None, :, None]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others,
) -> tuple[Tensor, None]:
    """What transformers calls: query (batch, heads, sequence, width), key and value with as many heads or a divisor of
    them, attention_mask from `first_keys`. Returns (batch, sequence, heads, width). Raises ValueError for what it does
    not know: dropout, attention in both directions, soft caps, sinks and biases."""
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    unknown += ["dropout"] * (dropout > 0) + ["both directions"] * (not getattr(module, "is_causal", True))
    if unknown:
        raise ValueError(f"varlen attention knows no {', '.join(unknown)}: set model.attention to sdpa or eager")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    with torch.autocast(kind, enabled=False):  # it would take the probabilities in fp32
        return OPERATOR(query, key, value, attention_mask, scale), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, first_keys)


@torch.library.custom_op("samecurve::varlen_attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float) -> Tensor:
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    for row, (q, k, v) in enumerate(_rows(query, key, value)):
        for at, seen, bias in _blocks(first[row, 0, :, 0], query.dtype):
            probabilities = _probabilities(q[:, at], k[:, seen], bias, scale)
            output[row, at] = torch.bmm(probabilities, v[:, seen]).transpose(0, 1)
    return output


@torch.library.custom_op("samecurve::varlen_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """gradient: (batch, sequence, heads, width). Returns those of query, key and value; sums over queries in fp32."""
    of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
    per_key, per_value = (torch.empty(query.shape[1], *x.shape[2:], device=x.device) for x in (key, value))
    for row, (q, k, v) in enumerate(_rows(query, key, value)):
        given = gradient[row].transpose(0, 1).contiguous()
        per_key.zero_(), per_value.zero_()
        for at, seen, bias in _blocks(first[row, 0, :, 0], query.dtype):
            probabilities = _probabilities(q[:, at], k[:, seen], bias, scale)
            per_value[:, seen] += torch.bmm(probabilities.transpose(1, 2), given[:, at])
            of_probabilities = torch.bmm(given[:, at], v[:, seen].transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype)
            of_query[row, :, at] = torch.bmm(of_scores, k[:, seen])
            per_key[:, seen] += torch.bmm(of_scores.transpose(1, 2), q[:, at])
        of_query[row] *= scale
        of_key[row] = _shared(per_key, len(key[row])) * scale
        of_value[row] = _shared(per_value, len(value[row]))
    return of_query, of_key, of_value


@_forward.register_fake
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


_forward.register_autograd(_differentiate, setup_context=_keep)
OPERATOR = torch.ops.samecurve.varlen_attention.default


@register_flop_formula(torch.ops.samecurve.varlen_attention)
def _forward_flops(query: torch.Size, *_, **__) -> int:
    """Of the whole square, which is how torch counts its own attention."""
    batch, heads, length, width = query
    return 4 * batch * heads * length**2 * width


@register_flop_formula(torch.ops.samecurve.varlen_attention_backward)
def _backward_flops(_gradient: torch.Size, query: torch.Size, *_, **__) -> int:
    return 5 * _forward_flops(query) // 2


def _rows(query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """(heads, sequence, width) of each row; keys and values again for each head that shares them."""
    groups = query.shape[1] // key.shape[1]
    for q, k, v in zip(query, key, value, strict=True):
        yield q.contiguous(), *(x.contiguous() if groups == 1 else x.repeat_interleave(groups, 0) for x in (k, v))


def _shared(gradient: Tensor, heads: int) -> Tensor:
    return gradient if len(gradient) == heads else gradient.unflatten(0, (heads, -1)).sum(dim=1)


def _blocks(first: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, the keys that one of them sees, what is added to their scores) of one row. first: (sequence,)."""
    starts = first.tolist()
    for at in _cuts(starts):
        seen = slice(starts[at.start], at.stop)
        bias = _causal(at.stop - at.start, seen.stop - seen.start, dtype, first.device)
        if starts[at.stop - 1] > seen.start:
            hidden = torch.arange(seen.start, seen.stop, device=first.device) < first[at, None]
            bias = bias.masked_fill(hidden, float("-inf"))
        yield at, seen, bias


def _cuts(starts: list[int]) -> Iterator[slice]:
    """Blocks of queries, the next one beginning where a document does if the block is no longer too small for that."""
    begins, start = [i for i, first in enumerate(starts) if i == first], 0
    while start < len(starts):
        place = bisect_left(begins, start + SMALLEST)
        stop = min(start + BLOCK, begins[place] if place < len(begins) else len(starts))
        yield slice(start, stop)
        start = stop


@lru_cache(maxsize=256)
def _causal(num_queries: int, num_keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The last query sees all keys, each one before it one less."""
    whole = torch.full((num_queries, num_keys), float("-inf"), dtype=dtype, device=device)
    return whole.triu(num_keys - num_queries + 1)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    return torch.softmax(torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale), dim=-1)
