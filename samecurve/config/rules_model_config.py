"""Rules on the numbers in `model.config`. Its keys are checked once transformers is loaded (models/hf_config.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from samecurve.config.documents import describe
from samecurve.config.section import LARGEST_INTEGER

Finding = tuple[str, str]
# Far above any model. Products of two sizes still fit 64 bits.
LARGEST_SIZE, MOST_LAYERS = 1 << 26, 10_000
# Sizes of tensors and numbers of layers, by the names of families that have their own. Not head_dim: some have 0.
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "num_layers", "num_heads", "n_layer", "n_layers", "n_head", "n_heads"),
    *("n_embd", "n_inner", "d_model", "d_ff", "d_kv", "ffn_dim", "dim", "hidden_dim", "embedding_size"),
    *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim"),
}


def _numbers(value: Callable[[str], Any]) -> Iterator[Finding]:
    """Numbers must be finite and fit 64 bits. Inside a list, infinity is allowed: it may stand for no limit."""
    for key, number in _flat("model.config", value("model.config") or {}):
        if isinstance(number, float) and (math.isnan(number) or (math.isinf(number) and key.count(".") == 2)):
            yield key, f"found {describe(number)}, expected a finite number"
        elif isinstance(number, int) and abs(number) > LARGEST_INTEGER and key.rpartition(".")[2] not in _SIZES:
            yield key, f"found {describe(number)}, expected a number of at most {LARGEST_INTEGER}"


def _sizes(value: Callable[[str], Any]) -> Iterator[Finding]:
    yield from size_problems(value("model.config") or {}, "model.config.")


def size_problems(fields: dict[str, Any], prefix: str = "") -> Iterator[Finding]:
    """Yield (key, problem) for sizes in a Hugging Face config with which transformers would fail or build for hours.

    prefix: of the keys in messages.
    """
    for key, size in fields.items():
        most = MOST_LAYERS if "layer" in key else LARGEST_SIZE
        if isinstance(size, dict):
            yield from size_problems(size, f"{prefix}{key}.")
        elif key in _SIZES and (isinstance(size, str) or (isinstance(size, int) and not 1 <= size <= most)):
            yield f"{prefix}{key}", f"found {describe(size)}, expected a number of at least 1 and at most {most:,}"


RULES = _numbers, _sizes


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value
