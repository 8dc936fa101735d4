"""Maps a recipe's `precision` to dtypes of torch and of model configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Precisions of a matrix multiplication. In tf32, NVIDIA's tensor cores round fp32 operands to 10 bits of mantissa.
MATMUL_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
# Names of the types of a GGUF's matrices. q8_0: 8 bits, with a scale for each 32 values of a row.
GGUF_TYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0"}
PRECISIONS = {name: precision for precision, name in DTYPES.items()}


def torch_dtype(precision: str) -> torch.dtype:
    """Return torch's dtype of a precision, which is a key of DTYPES."""
    import torch

    return getattr(torch, DTYPES[precision])


def compute_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype for mixed-precision computation; None for fp32, in which nothing is cast."""
    return None if precision == "fp32" else torch_dtype(precision)


COMPILED = ("regional", "full")  # `auto` becomes one of the values before a model is built
