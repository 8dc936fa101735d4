"""What a recipe's `precision` is called in torch and in model configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PRECISIONS = {name: precision for precision, name in DTYPES.items()}


def torch_dtype(precision: str) -> torch.dtype:
    """precision: a key of DTYPES."""
    import torch

    return getattr(torch, DTYPES[precision])


def compute_dtype(precision: str) -> torch.dtype | None:
    """As libraries want it for what is computed in less than fp32; None for fp32: nothing is cast."""
    return None if precision == "fp32" else torch_dtype(precision)
