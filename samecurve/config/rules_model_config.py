"""Rules that compare `model.config` with the fields of the family's config class, without loading transformers."""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from samecurve.config.documents import describe, suggest
from samecurve.config.section import LARGEST_INTEGER
from samecurve.config.transformers_source import ConfigClass, Field, family, model_types

Finding = tuple[str, str]
# Fields that another key of the recipe sets; transformers would accept the value without effect.
OWNED = {"attn_implementation": "model.attention", "dtype": "precision", "torch_dtype": "precision"}
# Sizes of tensors and numbers of layers, by the names of families that have their own.
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "num_layers", "num_heads", "n_layer", "n_layers", "n_head", "n_heads"),
    *("n_embd", "n_inner", "d_model", "d_ff", "d_kv", "ffn_dim", "dim", "hidden_dim", "embedding_size"),
    *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
}


def _known_family(value: Callable[[str], Any]) -> Iterator[Finding]:
    found, known = _fields(value).get("model_type"), model_types()
    if isinstance(found, str) and known and found not in known:
        near = difflib.get_close_matches(found, known, n=1)
        text = f"transformers {metadata.version('transformers')} has no model_type {found}"
        yield "model.config.model_type", text + (f"; did you mean {near[0]}?" if near else "")


def _keys(value: Callable[[str], Any]) -> Iterator[Finding]:
    fields = _fields(value)
    made_as, refused = _class_of(fields), _refused(fields)
    yield from refused.items()
    for key, found in fields.items():
        name = f"model.config.{key}"
        if made_as and name not in refused and (text := _complaint(made_as, made_as.aliases.get(key, key), found)):
            yield name, text


def _class_of(fields: dict[str, Any]) -> ConfigClass | None:
    model_type = fields.get("model_type")
    return family(model_type) if isinstance(model_type, str) else None


def _refused(fields: dict[str, Any]) -> dict[str, str]:
    """Return why keys are refused, whatever their values are."""
    made_as, found = _class_of(fields), {}
    legal = [("model", "config", name) for name in (*made_as.fields, *made_as.aliases)] if made_as else []
    for key in fields:
        path = ("model", "config", key)
        if key in OWNED:
            found[".".join(path)] = f"the recipe's {OWNED[key]} sets it; remove it here"
        elif made_as and path not in legal and key not in made_as.also and key != "model_type":
            text = f"the config of {fields['model_type']} has no such key{suggest(path, legal) or '; remove it'}"
            found[".".join(path)] = text
    return found


def accepted(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a published config.json whose keys a recipe's `model.config` may have."""
    refused = _refused(fields)
    return {key: value for key, value in fields.items() if f"model.config.{key}" not in refused}


def _numbers(value: Callable[[str], Any]) -> Iterator[Finding]:
    """Numbers must be finite and fit 64 bits. Inside a list, infinity is allowed: it may stand for no limit."""
    for key, found in _flat("model.config", _fields(value)):
        if isinstance(found, float) and (math.isnan(found) or (math.isinf(found) and key.count(".") == 2)):
            yield key, f"found {describe(found)}, expected a finite number"
        elif isinstance(found, int) and abs(found) > LARGEST_INTEGER:
            yield key, f"found {describe(found)}, expected a number of at most {LARGEST_INTEGER}"


RULES = _known_family, _keys, _numbers


def _fields(value: Callable[[str], Any]) -> dict[str, Any]:
    return value("model.config") or {}


def _complaint(made_as: ConfigClass, name: str, found: Any) -> str | None:
    known = made_as.fields.get(name, Field(None))
    if not known.accepts(found):
        hint = ""
        # huggingface_hub's strict dataclasses convert no numbers
        if isinstance(found, int) and not isinstance(found, bool) and known.accepts(0.5):
            hint = f"; write {found}.0"
        elif isinstance(found, float) and found.is_integer() and known.accepts(1):
            hint = f"; write {int(found)}"
        return f"found {describe(found)}, expected {known.needed}{hint}"
    names = {name, *(theirs for theirs, own in made_as.aliases.items() if own == name)}
    if names & _SIZES and isinstance(found, int) and found < 1 and not isinstance(found, bool):
        default = known.default.value if isinstance(known.default, ast.Constant) else None
        # some families ship such sizes: head_dim of glm5_next is 0
        if found != default:
            return f"found {found}, expected a number of at least 1"
    return None


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value
