"""Attention whose dropout is drawn by models.dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import create_position_bias_mask, sdpa_attention_forward


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' "sdpa" attention, with the dropout of `module.dropout_place` if there is one.

    Other functions are replaced by a TorchFunctionMode; here torch.compile would break the graph (torch 2.13).

    Arguments and result are those of transformers' function sdpa_attention_forward.
    """
    place = getattr(module, "dropout_place", None)
    if not dropout or place is None:
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options, **others)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    if position_bias is not None:
        attention_mask = create_position_bias_mask(position_bias, attention_mask, causal, query, key)
        causal = False
    mixed = attention(query, key, value, place.drop, attention_mask, dropout, causal, scaling, enable_gqa=True)
    return mixed.transpose(1, 2).contiguous(), None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    drop: Callable[[Tensor, float], Tensor],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention with its dropout by `drop`: torch's fused kernels draw their own masks.

    Args:
        query, key, value: (sequences, heads, tokens, width); fewer heads of key and value with `enable_gqa`.
        drop: maps (values, rate) to values.
        attn_mask, dropout_p, is_causal, scale, enable_gqa: as in torch's function.
    """
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return drop(scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype), dropout_p) @ value
