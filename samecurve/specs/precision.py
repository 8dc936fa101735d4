"""Precisions by the names that recipes and options have for them, and the dtypes of those names in PyTorch."""

from __future__ import annotations

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
