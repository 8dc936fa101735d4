"""Balanced parts of a causal row: of 2 n equal chunks, the i-th of n ranks has the i-th from either end.

A query sees the keys before its own, so the ranks of n consecutive parts would see 1, 3, 5, ... 2 n - 1 of n^2 shares
of the visible pairs, and all would wait for the last one. A chunk from the head and one from the tail are 1 / n of
these pairs for every rank, as in section 3.3.2 of Llama 3 (arXiv:2407.21783). With several documents in a row, or a
window, the shares are only roughly equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunks(index: int, count: int) -> tuple[int, int]:
    """Return the two chunks of part `index` of `count`, as indices among the row's 2 * count chunks."""
    return index, 2 * count - 1 - index


def cut(rows: Tensor, index: int, count: int, dim: int) -> Tensor:
    """Return the balanced part of whole rows that one rank computes: one chunk from the head, one from the tail.

    Args:
        rows: whole rows, whose length along `dim` is a multiple of 2 * count.
        index: which part, 0-based.
        count: number of parts.
        dim: the dimension of the tokens.
    """
    pieces = rows.chunk(2 * count, dim)
    return torch.cat([pieces[place] for place in chunks(index, count)], dim)


def join(parts: Tensor, count: int, dim: int) -> Tensor:
    """Put the parts of all ranks, concatenated along `dim` in the ranks' order, into the order of the row."""
    pieces = parts.chunk(2 * count, dim)
    return torch.cat([*pieces[::2], *reversed(pieces[1::2])], dim)
