"""The model families that a pipeline can cut, and where they keep their parts. Importing it loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Family:
    """Where a model family keeps its parts, and which attention its layers have.

    kinds: config -> "full_attention" or "sliding_attention" for every layer.
    """

    embedding: str
    layers: str
    norm: str
    kinds: Callable[[PreTrainedConfig], list[str]]
    rotary: str | None = None
    positions: str | None = None
    dropout: str | None = None


def _full(config: PreTrainedConfig) -> list[str]:
    return ["full_attention"] * config.num_hidden_layers


def _by_window(config: PreTrainedConfig) -> list[str]:
    return ["full_attention" if config.sliding_window is None else "sliding_attention"] * config.num_hidden_layers


def _by_layer(config: PreTrainedConfig) -> list[str]:
    return list(config.layer_types)


def _llama_like(kinds: Callable[[PreTrainedConfig], list[str]]) -> Family:
    return Family("model.embed_tokens", "model.layers", "model.norm", kinds, rotary="model.rotary_emb")


FAMILIES = {
    "llama": _llama_like(_full),
    "mistral": _llama_like(_by_window),
    "qwen2": _llama_like(_by_layer),
    "qwen3": _llama_like(_by_layer),
    "gpt2": Family(
        "transformer.wte",
        "transformer.h",
        "transformer.ln_f",
        _full,
        positions="transformer.wpe",
        dropout="transformer.drop",
    ),
}
