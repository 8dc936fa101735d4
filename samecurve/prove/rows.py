"""Rows of what a model is given, by their content: the same row has the same hash in any batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samecurve.losses.cross_entropy import IGNORE_INDEX


def rows_of(args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """Hash each row of a model's inputs, tensors whose first size is the batch's, as "name:hash ..." of them.

    Padding does not count, nor what is computed of trained weights, which has a history.
    """
    leaves = [
        (name, leaf)
        for name, leaf in (*_leaves(args), *_leaves(kwargs))
        if leaf.ndim and not (leaf.requires_grad and (isinstance(leaf, nn.Parameter) or not leaf.is_leaf))
    ]
    inputs = {name.rpartition(".")[2]: leaf for name, leaf in leaves}
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    answers = inputs.get("labels") if "decoder_input_ids" in inputs else None  # padded by themselves
    leaves = [(name, leaf) for name, leaf in leaves if leaf is not mask]
    size, hashes = leaves[0][1].shape[0] if leaves else 0, []
    leaves = [(name, leaf) for name, leaf in leaves if leaf.shape[0] == size]
    for index in range(size):
        starts = [0]  # of texts that are packed into a row
        if positions is not None and positions.ndim == 2 and len(positions) == size:
            starts = [*dict.fromkeys([0, *(positions[index] == 0).nonzero().flatten().tolist()])]
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            parts = []
            for name, leaf in leaves:
                row = leaf[index]
                if answers is not None and name.rpartition(".")[2] in ("labels", "decoder_input_ids"):
                    row = row[: max((answers[index] != IGNORE_INDEX).nonzero().flatten().tolist(), default=-1) + 1]
                elif mask is not None and mask.ndim > 1 and mask.shape == leaf.shape:
                    row = row[start:stop][mask[index][start:stop].bool()]
                elif positions is not None and positions.shape == leaf.shape:
                    row = row[start:stop]
                values = row.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # NumPy has no bfloat16
                digest = hashlib.blake2b(values.numpy().tobytes(), digest_size=6)
                parts.append(f"{name}:{digest.hexdigest()}")
            hashes.append(" ".join(parts))
    return hashes


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers, also in those that PyTorch's trees do not know, by their dotted names."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if is_dataclass(value) and not isinstance(value, type):
        value = {part.name: getattr(value, part.name, None) for part in fields(value)}
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for key, part in value.items() if isinstance(value, Mapping) else ():
        yield from _leaves(part, f"{name}.{key}" if name else str(key))
