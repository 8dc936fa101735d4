"""Causal attention within documents, without a dense mask: `model.attention: varlen`.

On a GPU the implementation is torch's `varlen_attn`, on a CPU block_causal.py, which goes without most of the scores
that a mask hides.

Importing this module registers the name with transformers, whose models then get a `VarlenMask` as their mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from samecurve.models.attention import block_causal
from samecurve.models.attention.mask_facts import known

NAME = "varlen"
WIDEST_ON_A_GPU = 256
OPERATORS = (block_causal.OPERATOR, torch.ops.torch_attn._varlen_attn.default)
"""The operators on a CPU and on a GPU."""
_SHARES_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 has no such argument


@dataclass(frozen=True)
class VarlenMask:
    """Range of visible keys for each query of a micro-batch, computed once for all layers.

    Attributes:
        first: int64 (batch_size, 1, sequence_length, 1), index of the first visible key; the last one is the query's
            own. None where `documents` takes its place.
        documents: the same for `varlen_attn` on a GPU; None on a CPU.
    """

    first: Tensor | None
    documents: PackedDocuments | None


class PackedDocuments(NamedTuple):
    """Documents of a micro-batch whose rows are concatenated.

    Attributes:
        starts: int32 (num_documents + 1,), start of each document and end of the last one.
        longest: number of tokens of the longest document, or an upper bound.
        window: maximum number of visible keys before a query's own; -1 for all keys back to the document's start.
            Decided here, not in the layers, which would be compiled anew for each length.
    """

    starts: Tensor
    longest: int
    window: int

    @classmethod
    def of(cls, starts: Tensor, longest: int, window: int | None) -> PackedDocuments:
        return cls(starts, longest, -1 if window is None or window + 1 >= longest else window)


def visible_keys(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **arguments
) -> VarlenMask:
    """Compute the visible keys; transformers calls this function in place of building a mask.

    Args:
        arguments: see `first_visible`; others are ignored.

    Raises:
        ValueError: keys come from a cache.
    """
    if (q_length, q_offset, kv_offset) != (kv_length, 0, 0):
        raise ValueError("varlen attention takes whole rows, without a cache of keys: pass use_cache=False")
    on_gpu = _on_gpu(arguments.get("device", "cpu"))
    if on_gpu and (documents := _known(**arguments)) is not None:
        return VarlenMask(None, documents)
    first = first_visible(batch_size, q_length, **arguments)
    # torch gives no type to a function under torch.compiler.disable
    computed: PackedDocuments | None = _documents(first) if on_gpu else None  # pyright: ignore[reportArgumentType, reportAssignmentType]
    return VarlenMask(first[:, None, :, None], computed)


def first_visible(
    batch_size: int,
    length: int,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_,
) -> Tensor:
    """Find the first visible key of each token of whole rows: int64 (batch_size, length).

    Args:
        mask_function: (row, head, query, key) -> whether the key is visible. Visible keys must form one contiguous
            range that ends at the query, as in causal masks, also with documents or sliding windows. The start of the
            range is found by bisection.
        attention_mask: (batch_size, length), 0 for padding before the first token or after the last one; no token sees
            padding.
    """
    rows = torch.arange(batch_size, device=device)[:, None]
    queries = torch.arange(length, device=device)[None, :]
    head = torch.zeros((), dtype=torch.long, device=device)
    lowest, highest = torch.zeros_like(queries).expand(batch_size, -1), queries.expand(batch_size, -1)
    for _ in range((length - 1).bit_length()):
        middle = (lowest + highest) // 2
        seen = mask_function(rows, head, queries, middle)
        lowest = torch.where(seen, lowest, torch.minimum(middle + 1, highest))
        highest = highest.where(~seen, middle)
    if attention_mask is not None:
        begin = attention_mask.int().argmax(dim=-1, keepdim=True)
        highest = torch.where(queries < begin, highest, torch.maximum(highest, begin))
    return highest


def _on_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def _known(
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    **_,
) -> PackedDocuments | None:
    """Return the documents that the data loader has found, without a read from the device; None if not applicable.

    Args:
        local_size: size of a sliding window, or of the chunks of llama4_text, which documents cannot express.
        use_vmap: whether a family has changed the mask by a function of its own.
    """
    facts, window = known(), None if local_size is None else local_size - 1
    if facts.starts is None or use_vmap or local_size not in (None, getattr(config, "sliding_window", None)):
        return None
    return PackedDocuments.of(facts.starts.to(device, non_blocking=True), facts.longest, window)


@torch.compiler.disable  # the number of documents depends on the data
def _documents(first: Tensor) -> PackedDocuments:
    """Find the documents from `first`, (batch_size, sequence_length). Synchronizes with the device."""
    before = torch.arange(first.shape[1], device=first.device) - first
    begins = (before == 0).flatten().nonzero().flatten()
    starts = nn.functional.pad(begins, (0, 1), value=first.numel())  # a new tensor of it would wait once more
    longest, window = torch.stack([starts.diff().max(), before.max()]).tolist()
    return PackedDocuments.of(starts.int(), longest, window)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VarlenMask,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Compute attention; the function that transformers' models call.

    Args:
        module: the attention module.
        query: (batch, heads, sequence, width).
        key: (batch, key heads, sequence, width); the number of key heads divides that of heads.
        value: in the shape of `key`.
        attention_mask: from `visible_keys`.
        dropout: must be 0.
        scaling: factor of the scores; None: 1 / sqrt(width).

    Returns:
        (output (batch, sequence, heads, width), None).

    Raises:
        ValueError: dropout, bidirectional attention, soft caps, sinks or biases, which are not supported.
    """
    if unknown := unsupported(module, dropout, others):
        raise ValueError(f"varlen attention does not support {unknown}: set model.attention to sdpa or eager")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    with torch.autocast(kind, enabled=False):  # autocast would compute the probabilities in fp32
        if attention_mask.documents is not None:
            return _of_torch(query, key, value, attention_mask.documents, scale), None
        assert attention_mask.first is not None
        return block_causal.attend(query, key, value, attention_mask.first, scale), None


def unsupported(module: nn.Module, dropout: float, others: Mapping[str, Any]) -> str:
    """Name what attention over a range of keys that ends at the query cannot compute; "" if it can compute all."""
    reasons = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    reasons += ["dropout"] * (dropout > 0) + ["bidirectional attention"] * (not getattr(module, "is_causal", True))
    return ", ".join(reasons)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, visible_keys)


def _of_torch(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, scale: float) -> Tensor:
    """Call torch's varlen_attn, which takes (tokens, heads, width) with all rows concatenated."""
    starts, longest, window = documents
    if not _SHARES_HEADS:
        groups = query.shape[1] // key.shape[1]
        key, value = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (key, value))
    flat_query, flat_key, flat_value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    shared: dict[str, Any] = {"enable_gqa": True} if _SHARES_HEADS else {}
    output = varlen_attn(
        flat_query,
        flat_key,
        flat_value,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(window, 0),
        **shared,
    )
    assert isinstance(output, Tensor)  # a tuple only with return_aux
    return output.unflatten(0, (query.shape[0], query.shape[2]))
