"""Answers from the host to what transformers would ask the device about each micro-batch's attention mask.

To find out whether it needs a mask at all, transformers (5.23, masking_utils.py) reads two values from the device in
each forward pass: whether rows have several documents, and whether there is padding. varlen.py would read where
documents start. Each read waits for all queued kernels, although the data loader knows the answers. Importing this
module wraps these functions of transformers: within `masks_from` they return the loader's answers, elsewhere they read
from the device as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional
from transformers import masking_utils


class MaskFacts(NamedTuple):
    """Known properties of a micro-batch; None: unknown.

    Attributes:
        packed: whether position_ids ever go on by another step than 1 within a row, as between two documents.
        padded: whether the attention_mask has a 0.
        starts: int32 (num_documents + 1,) on the host, start of each document and end of the last one where the rows
            are concatenated.
        longest: upper bound of the tokens of a document.
        positions: position_ids, for models that make their masks without them (models/packed_rows.py).
    """

    packed: bool | None = None
    padded: bool | None = None
    starts: Tensor | None = None
    longest: int = 0
    positions: Tensor | None = None


_UNKNOWN = MaskFacts()
_CURRENT = ContextVar("mask facts", default=_UNKNOWN)


def known() -> MaskFacts:
    """Return what is known of the micro-batch whose forward pass runs."""
    return _CURRENT.get()


@contextmanager
def masks_from(facts: MaskFacts) -> Iterator[None]:
    """Answer transformers' questions in the body, the forward pass of one micro-batch."""
    before = _CURRENT.set(facts)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def _documents(ask: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Wrap find_packed_sequence_indices: position_ids (rows, tokens) -> index of each token's document, or None."""

    @wraps(ask)
    def answer(position_ids: Tensor) -> Tensor | None:
        packed = _CURRENT.get().packed
        if packed is None:
            return ask(position_ids)
        return functional.pad(position_ids.diff(dim=1) != 1, (1, 0)).cumsum(1) if packed else None

    return answer


def _needless(ask: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap a function that finds out whether sdpa can do without a mask. Its first argument is the padding mask."""

    @wraps(ask)
    def answer(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        padded = None if padding_mask is None else _CURRENT.get().padded
        if padded is None:
            return ask(padding_mask, *args, **kwargs)
        return not padded and ask(None, *args, **kwargs)

    return answer


_WRAPPERS = {
    "find_packed_sequence_indices": _documents,
    "_ignore_causal_mask_sdpa": _needless,
    "_ignore_bidirectional_mask_sdpa": _needless,
}
for _name, _wrapper in _WRAPPERS.items():
    setattr(masking_utils, _name, _wrapper(getattr(masking_utils, _name)))
