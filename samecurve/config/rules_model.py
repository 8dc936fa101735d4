"""Rules for the model, its config and its adapter that involve more than one recipe key."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from samecurve.config.documents import Finding, describe
from samecurve.config.schema import Adapter
from samecurve.config.section import LARGEST_INTEGER
from samecurve.config.source import InvalidValue, RecipeSource
from samecurve.specs.model_families import text_fields
from samecurve.specs.tasks import TASKS
from samecurve.storage.records import read_record

_CONFIG = {"model_type?": (str, None), "text_config?": ({"model_type?": (str, None)}, None)}  # what rules ask of it
# Far above any model. Products of two sizes still fit 64 bits.
LARGEST_SIZE, MOST_LAYERS, MOST_PARTS = 1 << 26, 10_000, 1_000_000
# Sizes of tensors and numbers of layers, by the names of families that have their own. Not head_dim: some have 0.
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "num_layers", "num_heads", "n_layer", "n_layers", "n_head", "n_heads"),
    *("n_embd", "n_inner", "d_model", "d_ff", "d_kv", "ffn_dim", "dim", "hidden_dim", "embedding_size"),
    *("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim"),
}
# Other numbers of what is built one by one. Families may have none of them.
_PARTS = re.compile("(?!.*(size|dim)).*(layers|blocks|stages|experts|num_labels)")


def _numbers(value: Callable[[str], Any]) -> Iterator[Finding]:
    """Numbers must be finite and fit 64 bits. Inside a list, infinity is allowed: it may stand for no limit."""
    for key, number in _flat("model.config", value("model.config") or {}):
        if isinstance(number, float) and (math.isnan(number) or (math.isinf(number) and key.count(".") == 2)):
            yield key, f"found {describe(number)}, expected a finite number"
        elif isinstance(number, int) and abs(number) > LARGEST_INTEGER and key.rpartition(".")[2] not in _SIZES:
            yield key, f"found {describe(number)}, expected a number of at most {LARGEST_INTEGER}"


def size_problems(fields: dict[str, Any], prefix: str = "") -> Iterator[Finding]:
    """Yield (key, problem) for what in a Hugging Face config makes transformers fail, or build for hours.

    prefix: of the keys in messages.
    """
    for key, size in fields.items():
        is_part = _PARTS.match(key)
        most = MOST_LAYERS if "layer" in key else MOST_PARTS if is_part else LARGEST_SIZE
        if isinstance(size, dict):
            yield from size_problems(size, f"{prefix}{key}.")
        elif key == "model_type" and not isinstance(size, (str, NoneType)):
            yield f"{prefix}{key}", f"found {describe(size)}, expected text, for example llama"
        elif key in _SIZES and (isinstance(size, str) or (isinstance(size, (int, float)) and not 1 <= size <= most)):
            yield f"{prefix}{key}", f"found {describe(size)}, expected a number of at least 1 and at most {most:,}"
        elif is_part and isinstance(size, (int, float)) and size > most:
            yield f"{prefix}{key}", f"found {describe(size)}, expected a number of at most {most:,}"


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


def _origin(value: Callable[[str], Any]) -> Iterator[Finding]:
    path, config = value("model.path"), value("model.config")
    if path is not None and config is not None:
        yield "model", "both path (pretrained) and config (from scratch) are given; set one of them to null"
    elif path is None and config is None:
        yield "model", "neither path (pretrained) nor config (from scratch) is given; add one"


def _config(value: Callable[[str], Any]) -> Iterator[Finding]:
    config = value("model.config")
    if config is not None and "model_type" not in config:
        yield "model.config", "model_type is missing; add it, for example model_type: llama"
    yield from size_problems(config or {}, "model.config.")


def _revision(value: Callable[[str], Any]) -> Iterator[Finding]:
    revision, path = value("model.revision"), value("model.path")
    if revision is not None and (path is None or Path(path).is_dir()):
        why = "model.path is not given" if path is None else f"{path} is a folder, which has no revisions"
        yield "model.revision", f"found {revision}, but {why}; remove it"


def _overrides(value: Callable[[str], Any]) -> Iterator[Finding]:
    given = value("model.overrides")
    if given and value("model.path") is None:
        yield "model.overrides", "only changes the config of model.path; write the fields into model.config"
    seen = sorted(key for key in given if "drop" not in key)  # by all who load the adapter on the published model
    if seen and value("model.path") is not None and value("adapter.name") is not None:
        text = f"{', '.join(seen)} would not be exported with an adapter, which has no config of the model's; copy the "
        yield "model.overrides", text + "model's folder, change its config.json there, and set model.path to it"


def _new_from_scratch(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("model.new_head") and value("model.path") is None:
        yield "model.new_head", "found true, but a model from scratch is new as a whole; set it to false"
    chosen = value("model.unknown_tensors")
    if chosen in ("keep", "drop") and value("model.path") is None:
        yield "model.unknown_tensors", f"found {chosen}, but a model from scratch is read from no file; remove the key"


def _new_and_frozen(value: Callable[[str], Any]) -> Iterator[Finding]:
    task = value("task")
    # where the task refuses the key altogether, its own rule reports it
    trained = TASKS[task].trains_head or "model.new_head" in TASKS[task].refuses
    if value("model.new_head") and value("adapter.name") is not None and not trained:
        text = f"found true, but with an adapter the head of task {task} is frozen and would stay random; "
        yield "model.new_head", text + "train the whole model (adapter.name=null)"


def _quantization(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("adapter.quantization")
    package = "torchao" if kind == "torchao_int8" else "bitsandbytes"
    if kind is not None and importlib.util.find_spec(package) is None:
        text = f"found {kind}, which needs the package {package}; run pip install {package}, or use null"
        yield "adapter.quantization", text
    if kind is not None and value("adapter.dora"):
        yield "adapter.dora", "found true, but DoRA needs the norms of weights that are not quantized; use false"


def _parameters(value: Callable[[str], Any]) -> Iterator[Finding]:
    """peft adapts a weight that is no layer's by adding to it, which leaves no input to drop and no rows to norm."""
    for key in ("dropout", "dora"):
        if value("adapter.target_parameters") and value(f"adapter.{key}"):
            text = "peft cannot combine it with adapter.target_parameters; remove one of the two"
            yield f"adapter.{key}", f"found {describe(value(f'adapter.{key}'))}, but {text}"


def _no_target(value: Callable[[str], Any]) -> Iterator[Finding]:
    if not value("adapter.target_modules") and not value("adapter.target_parameters"):
        text = "found an empty list, and adapter.target_parameters names nothing either; name what is adapted"
        yield "adapter.target_modules", text


def _idle(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    given = value(f"adapter.{key}")
    if value("adapter.name") is None and given != Adapter.model_fields[key].default:
        text = f"found {describe(given)}, but adapter.name is null; set that to lora, or remove this key"
        yield f"adapter.{key}", text


def _adapts(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("adapter.name") is not None and value("model.config") is not None:
        text = f"found {value('adapter.name')}, which needs a pretrained model, but model.config makes a new one; "
        yield "adapter.name", text + "set model.path, or adapter.name to null"


def _positions(value: Callable[[str], Any]) -> Iterator[Finding]:
    length, given = value("batch.sequence_length"), value("model.config")
    fields, owner = (given, "model.config") if given else (architecture(value), "the model's config.json")
    for key in ("max_position_embeddings", "n_positions"):
        limit = fields.get(key)
        if isinstance(limit, int) and 0 < limit < length:  # -1 where there is no limit
            yield "batch.sequence_length", f"found {length}, but {key} in {owner} is {limit}; use at most {limit}"


def flash_packed(value: Callable[[str], Any]) -> Iterator[Finding]:
    """flash-attn separates packed documents, by their positions, only in a batch of one row."""
    if value("model.attention") != "flash_attention_2":
        return
    if value("data.packing") and value("batch.micro_batch_size") != 1:
        text = (
            f"found flash_attention_2, which cannot separate packed documents when batch.micro_batch_size is "
            f"{value('batch.micro_batch_size')}; set that to 1, or use sdpa, or data.packing: false"
        )
        yield "model.attention", text


def _flash_in_fp32(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("model.attention") == "flash_attention_2" and value("precision") == "fp32":
        yield "model.attention", "found flash_attention_2, which does not support fp32; use sdpa, or precision: bf16"


RULES = (
    *(_origin, _config, _numbers, _revision, _overrides),
    *(_new_from_scratch, _new_and_frozen),
    *(_quantization, _adapts, _parameters, _no_target),
    *(partial(_idle, key) for key in Adapter.model_fields if key != "name"),
    *(_positions, flash_packed, _flash_in_fp32),
)


def architecture(value: Callable[[str], Any]) -> dict[str, Any]:
    """The config of the model, or of a packaged model's text part, as far as the recipe or a local folder gives it."""
    config = value("model.config")
    if config is None and value("model.path") is not None:
        # of a name on the hub there is none
        config = read_record(Path(value("model.path")) / "config.json", _CONFIG).value
        if isinstance(config, dict):
            config = text_fields(config) | value("model.overrides")
    return config if isinstance(config, dict) else {}


def hidden_layers(source: RecipeSource) -> int | None:
    """The number of decoder layers, or None where the model would have to be loaded to know."""
    with contextlib.suppress(InvalidValue):
        fields = architecture(source.value)
        counts = [fields[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in fields]
        return counts[0] if counts and isinstance(counts[0], int) else None
    return None


def model_type(source: RecipeSource) -> str | None:
    """The model_type of transformers, or None where the model would have to be loaded to know."""
    with contextlib.suppress(InvalidValue):
        name = architecture(source.value).get("model_type")
        return name if isinstance(name, str) else None
    return None
