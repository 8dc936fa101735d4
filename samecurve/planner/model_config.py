"""Dimensions of a model from the fields of a Hugging Face config, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samecurve.errors import ConfigurationError
from samecurve.planner.shape import ModelShape

# The first name is Llama's, the others are those of older families.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "n_head_kv"),
    "ffn": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "moe_top_k"),
    "positions": ("n_positions",),
}
NEEDED = ("layers", "hidden", "heads", "vocab")
TWO_MATRICES = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "bert", "roberta")


def shape(fields: Mapping[str, Any], name: str, vocab: int | None = None) -> ModelShape:
    """Read the dimensions.

    Args:
        fields: a config's fields.
        name: of the file, for messages.
        vocab: size of a tokenizer that is trained for the job; it wins over the config's.

    Raises:
        ConfigurationError: a needed field is missing or no positive whole number.
    """
    found = {"vocab": vocab} if vocab else {}
    for key, names in NAMES.items():
        given = next((fields[each] for each in names if fields.get(each) is not None), None)
        if given is not None and key not in found:
            found[key] = given
    problems = [f"{name}: {' or '.join(NAMES[key][:2])} is missing; give it" for key in NEEDED if key not in found]
    problems += [
        f"{name}: {NAMES[key][0]}: found {value!r}, expected a positive whole number"
        for key, value in found.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < (key in NEEDED)
    ]
    if problems:
        raise ConfigurationError("\n".join(problems))
    gated = fields.get("model_type") not in TWO_MATRICES
    found.setdefault("kv_heads", found["heads"])
    found.setdefault("ffn", 4 * found["hidden"])
    tied = fields.get("tie_word_embeddings", not gated)
    return ModelShape(**found, gated=gated, tied=bool(tied))


def read(path: str) -> dict[str, Any]:
    """Read a config.json, or that of a folder, or of a hub name in the local cache. Raises ConfigurationError."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file() and path.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json")
        file = Path(cached) if isinstance(cached, str) else file
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigurationError(
            f"{path}: no such file, folder or cached model; give a config.json or a recipe"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"{file}: not JSON: {error}") from None
    return fields.get("text_config", fields)
