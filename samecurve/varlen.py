"""Causal attention document by document, without a mask: `model.attention: varlen`.

On a GPU it is torch's `varlen_attn`. On a CPU torch's own attention computes the scores that a mask then hides, and in
bf16 stays far below the speed of its matrix products; here, in such products, each block of queries meets only the keys
that some of it may see. As in FlashAttention (Dao et al., 2022, arXiv:2205.14135) probabilities are computed again for
the backward pass, so what is kept grows with the length of a row and not with its square. Scores are rounded to the
inputs' dtype, as in eager attention.

Importing it registers the name with transformers; what its models take for a mask is then `Visible`.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import register_flop_formula
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

NAME = "varlen"
BLOCK, SMALLEST = 256, 64
"""Queries. Fewer would compute less that is hidden, in matrices too small to be fast."""
WIDEST_ON_A_GPU = 256
_SHARES_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 has no such argument


@dataclass(frozen=True)
class Visible:
    """Which keys each query of a micro-batch sees, made once for all layers.

    first: int64 (batch_size, 1, sequence_length, 1), the first one; the last one is the query's own. documents: what
    `varlen_attn` wants in its place, on a GPU.
    """

    first: Tensor
    documents: Documents | None


class Documents(NamedTuple):
    """starts: int32 (num_documents + 1,), where each begins when all rows lie one after the other, and the end of the
    last. longest: tokens. window: how many keys before its own a query sees at most."""

    starts: Tensor
    longest: int
    window: int


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> Visible:
    """What transformers calls for a mask.

    mask_function: of (row, head, query, key), true over one stretch that ends with the query, which is then found by
    bisection: causal masks, their documents and their sliding windows are such. attention_mask: (batch_size,
    sequence_length), 0 for padding before the first token or after the last one, which no token sees. Raises ValueError
    for keys from a cache.
    """
    if (q_length, q_offset, kv_offset) != (kv_length, 0, 0):
        raise ValueError("varlen attention takes whole rows, without a cache of keys: pass use_cache=False")
    rows = torch.arange(batch_size, device=device)[:, None]
    queries = torch.arange(q_length, device=device)[None, :]
    head = torch.zeros((), dtype=torch.long, device=device)
    lowest, highest = torch.zeros_like(queries).expand(batch_size, -1), queries.expand(batch_size, -1)
    for _ in range((q_length - 1).bit_length()):
        middle = (lowest + highest) // 2
        seen = mask_function(rows, head, queries, middle)
        lowest = torch.where(seen, lowest, torch.minimum(middle + 1, highest))
        highest = highest.where(~seen, middle)
    if attention_mask is not None:
        begin = attention_mask.int().argmax(dim=-1, keepdim=True)
        highest = torch.where(queries < begin, highest, torch.maximum(highest, begin))
    return Visible(highest[:, None, :, None], _documents(highest) if _on_gpu(highest) else None)


def _on_gpu(first: Tensor) -> bool:
    return first.is_cuda


@torch.compiler.disable  # how many there are is data
def _documents(first: Tensor) -> Documents:
    """first: (batch_size, sequence_length). Waits for the device."""
    before = torch.arange(first.shape[1], device=first.device) - first
    begins = (before == 0).flatten().nonzero().flatten()
    starts = torch.cat([begins, begins.new_tensor([first.numel()])])
    longest, window = torch.stack([starts.diff().max(), before.max()]).tolist()
    return Documents(starts.int(), longest, window)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others,
) -> tuple[Tensor, None]:
    """What transformers calls: query (batch, heads, sequence, width), key and value with as many heads or a divisor of
    them, attention_mask from `visible_keys`.

    Returns (batch, sequence, heads, width). Raises ValueError for what it does not know: dropout, attention in both
    directions, soft caps, sinks and biases.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    unknown += ["dropout"] * (dropout > 0) + ["both directions"] * (not getattr(module, "is_causal", True))
    if unknown:
        raise ValueError(f"varlen attention knows no {', '.join(unknown)}: set model.attention to sdpa or eager")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    with torch.autocast(kind, enabled=False):  # it would take the probabilities in fp32
        if attention_mask.documents is not None:
            return _of_torch(query, key, value, attention_mask.documents, scale), None
        return OPERATOR(query, key, value, attention_mask.first, scale), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, visible_keys)


def _of_torch(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float) -> Tensor:
    """varlen_attn takes (tokens, heads, width), all rows one after the other."""
    starts, longest, window = documents
    if not _SHARES_HEADS:
        groups = query.shape[1] // key.shape[1]
        key, value = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (key, value))
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    sizes = (-1, 0) if window + 1 >= longest else (window, 0)
    shared = {"enable_gqa": True} if _SHARES_HEADS else {}
    output = varlen_attn(*flat, starts, starts, longest, longest, scale=scale, window_size=sizes, **shared)
    return output.unflatten(0, (query.shape[0], query.shape[2]))


@torch.library.custom_op("samecurve::varlen_attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float) -> Tensor:
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    for row in range(len(query)):
        for at, seen, bias in _blocks(first[row, 0, :, 0], query.dtype):
            q, k, v = _block(query[row], at), *(_block(x[row], seen, query.shape[1]) for x in (key, value))
            output[row, at] = torch.bmm(_probabilities(q, k, bias, scale), v).transpose(0, 1)
    return output


@torch.library.custom_op("samecurve::varlen_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, first: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """gradient: (batch, sequence, heads, width). Returns those of query, key and value; sums over queries in fp32."""
    of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
    per_key, per_value = (torch.zeros(x.shape[1:], device=x.device) for x in (key, value))
    for row in range(len(query)):
        for at, seen, bias in _blocks(first[row, 0, :, 0], query.dtype):
            q, k, v = _block(query[row], at), *(_block(x[row], seen, query.shape[1]) for x in (key, value))
            given = _block(gradient[row].transpose(0, 1), at)
            probabilities = _probabilities(q, k, bias, scale)
            per_value[:, seen] += _shared(torch.bmm(probabilities.transpose(1, 2), given), value.shape[1])
            of_probabilities = torch.bmm(given, v.transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype)
            of_query[row, :, at] = torch.bmm(of_scores, k).mul_(scale)
            per_key[:, seen] += _shared(torch.bmm(of_scores.transpose(1, 2), q), key.shape[1])
        of_key[row], of_value[row] = per_key.mul_(scale), per_value
        per_key.zero_(), per_value.zero_()
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
OPERATORS = (OPERATOR, torch.ops.torch_attn._varlen_attn.default)
"""On a CPU and on a GPU."""


@register_flop_formula(torch.ops.samecurve.varlen_attention)
def _forward_flops(query: torch.Size, *_, **__) -> int:
    """Of the whole square, which is how torch counts its own attention."""
    batch, heads, length, width = query
    return 4 * batch * heads * length**2 * width


@register_flop_formula(torch.ops.samecurve.varlen_attention_backward)
def _backward_flops(_gradient: torch.Size, query: torch.Size, *_, **__) -> int:
    return 5 * _forward_flops(query) // 2


def _block(row: Tensor, at: slice, heads: int | None = None) -> Tensor:
    """(heads, tokens, width) of some tokens, contiguous, or each product would make a copy of its own; again for each
    of the `heads` that share it. row: (heads, sequence, width)."""
    groups = 1 if heads is None else heads // len(row)
    return row[:, at].contiguous() if groups == 1 else row[:, at].repeat_interleave(groups, 0)


def _shared(gradient: Tensor, heads: int) -> Tensor:
    return gradient if len(gradient) == heads else gradient.unflatten(0, (heads, -1)).sum(dim=1, dtype=torch.float32)


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
