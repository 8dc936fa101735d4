"""Causal attention document by document, without a mask: `model.attention: varlen`.

On a GPU it is torch's `varlen_attn`. On a CPU torch's own attention computes the scores that a mask then hides, and in
bf16 stays far below the speed of its matrix products, of which `block_attention` is made.

Importing it registers the name with transformers; what its models take for a mask is then `Visible`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from samecurve.models.attention import block_causal

NAME = "varlen"
WIDEST_ON_A_GPU = 256
OPERATORS = (block_causal.OPERATOR, torch.ops.torch_attn._varlen_attn.default)
"""On a CPU and on a GPU."""
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
        return block_causal.attend(query, key, value, attention_mask.first, scale), None


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
