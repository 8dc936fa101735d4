"""Rules for memory, compile, fp8 and kernels that involve more than one recipe key."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from samecurve.config.schema import Memory

Finding = tuple[str, str]


def _idle(key: str, reader: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    kind, given = value("memory.activation_checkpointing"), value(f"memory.{key}")
    if kind != reader and given != Memory.model_fields[key].default:
        text = f"found {given}, but only {reader} uses it and memory.activation_checkpointing is {kind}"
        yield f"memory.{key}", f"{text}; remove it"


def _offload_compiled(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("compile") == "full" and value("memory.activation_checkpointing") == "offload":
        text = "found full, but memory.activation_checkpointing: offload copies to host memory in every layer, "
        yield "compile", f"{text}which breaks the compiled graph; use regional"


def _torchao(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("fp8") or "off"
    if kind != "off" and importlib.util.find_spec("torchao") is None:
        yield "fp8", f"found {kind}, which needs the package torchao; run pip install torchao, or use off"


def _fp8_of_bf16(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("fp8") or "off"
    if kind != "off" and value("precision") != "bf16":
        text = f"found {kind}, which needs bf16, but precision is {value('precision')}"
        yield "fp8", f"{text}; set precision to bf16, or use off"


def _fp8_of_4bit(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("fp8") or "off"
    if kind != "off" and value("adapter.quantization") is not None:
        yield "fp8", f"found {kind}, but 4-bit weights (adapter.quantization) use their own matrix products; use off"


def _liger(key: str, instead: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    if value(key) == "liger" and importlib.util.find_spec("liger_kernel") is None:
        yield key, f"found liger, which needs the package liger-kernel; run pip install liger-kernel, or use {instead}"


def _rotated_twice(value: Callable[[str], Any]) -> Iterator[Finding]:
    """Liger's rotary embedding overwrites saved tensors without autograd noticing.

    Seen with liger-kernel 0.8.5: it writes into the projections' results, so a saved result is rotated again when the
    layer is recomputed. The loss stays the same and the gradients are wrong (tests/unit/test_liger.py).
    """
    selective = value("memory.activation_checkpointing") == "selective"
    if value("model.kernels") == "liger" and selective and value("memory.selective_save") == "matmul":
        yield (
            "model.kernels",
            "found liger, which rotates queries and keys in place, but memory.selective_save: matmul keeps them and "
            "would rotate them twice; set that to attention, change memory.activation_checkpointing, or use torch",
        )


RULES = (
    partial(_idle, "selective_save", "selective"),
    partial(_idle, "every_n_layers", "every_n_layers"),
    *(_offload_compiled, _torchao, _fp8_of_bf16, _fp8_of_4bit),
    partial(_liger, "model.kernels", "torch"),
    partial(_liger, "loss.implementation", "auto"),
    _rotated_twice,
)
