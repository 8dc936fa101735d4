"""Selection of the attention implementation by `model.attention`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from samecurve.errors import ConfigurationError
from samecurve.models.attention import varlen
from samecurve.models.weight_conversion import supports
from samecurve.specs.model_families import attention_dropout, without_varlen

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from samecurve.config.schema import Recipe

# The fastest attention for packed documents by GPU. `bash scripts/bench_gpu.sh --only 8b-sft 8b-sft-varlen` writes the
# file (benchmarks/gpu/attention_table.py), which is empty while nothing has been measured.
MEASURED = Path(__file__).with_name("measured.json")
"""{device name: {"attention": name, "tokens_per_second": {name: rate}, "date": date, "versions": {name: version}}}."""


def choose_attention(
    recipe: Recipe, config: PreTrainedConfig, model_class: type[PreTrainedModel], kind: str = "causal_lm"
) -> str:
    """Return transformers' name of the implementation that `model.attention` selects.

    auto selects varlen where measurements found it faster: for a causal language model in bf16 on a CPU
    (benchmarks/kernels.md), on a GPU as json has it. Otherwise it selects sdpa, and eager for a family without
    sdpa.

    Args:
        recipe: gives `model.attention` and the precision.
        model_class: asked which implementations it supports.
        kind: kind of the output head (Head.kind).

    Raises:
        ConfigurationError: the family or this machine does not support the implementation.
    """
    asked = recipe.model.attention
    if asked in ("sdpa", "flex_attention", "flash_attention_2") and not supports(model_class, asked):
        raise ConfigurationError(
            f"model.attention: found {asked}, which transformers does not have for a {config.model_type}; use "
            "eager or auto"
        )
    rate = attention_dropout(config.to_dict())
    if rate and asked in ("flash_attention_2", "flex_attention"):
        raise ConfigurationError(
            f"model.attention: found {asked}, but {rate}, and its kernels cannot draw the masks of dropout that all "
            f"strategies share; set that rate to 0 in model.config, or use sdpa"
        )
    if asked not in ("auto", varlen.NAME):
        return asked
    on_gpu = torch.cuda.is_available()
    reason = without_varlen(config.to_dict()) or (_without_varlen_on_gpu(config, recipe.precision) if on_gpu else None)
    if asked == varlen.NAME and reason:
        raise ConfigurationError(f"model.attention: found varlen, but {reason}; use auto")
    fastest = measured_fastest(recipe) if on_gpu else varlen.NAME
    gains = recipe.precision == "bf16" and kind == "causal_lm" and fastest == varlen.NAME
    if asked == varlen.NAME or (gains and not reason):
        return varlen.NAME
    return "sdpa" if supports(model_class, "sdpa") else "eager"


def _without_varlen_on_gpu(config: PreTrainedConfig, precision: str) -> str | None:
    """Reason why the kernels behind torch's varlen_attn cannot be used on this GPU, or None."""
    if precision == "fp32":
        return "a GPU computes it in bf16 and fp16 only"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is too old for it (compute capability below 8.0)"
    # jetmoe has another name for the field head_dim, and some layers of gemma4_text have another width
    fields, own = config.to_dict(), config.attribute_map.get("head_dim", "head_dim")
    parts = fields, *(fields.get("per_layer_config") or {}).values()
    widths = [(name, part[name]) for part in parts for name in part if name == own or name.endswith("head_dim")]
    derived = "hidden_size / num_attention_heads", config.hidden_size // config.num_attention_heads
    for name, width in [(name, width) for name, width in widths if width] or [derived]:
        if width % 8 or width > varlen.WIDEST_ON_A_GPU:
            return f"{name} is {width}, and a GPU computes it for multiples of 8 up to {varlen.WIDEST_ON_A_GPU}"
    return None


def packs_documents(recipe: Recipe) -> bool:
    """Whether rows hold several documents: conversations do; one long text has none, and sdpa needs no mask for it."""
    return recipe.task == "sft" and recipe.data.packing


def measured_fastest(recipe: Recipe, path: Path = MEASURED) -> str | None:
    """Return the attention that `model.attention: auto` selects on this GPU by measurement; None: there is none."""
    if not (packs_documents(recipe) and recipe.precision == "bf16"):
        return None
    return _table(path).get(torch.cuda.get_device_name(), {}).get("attention")


def describe_choice(recipe: Recipe, device: torch.device, path: Path = MEASURED) -> str:
    """Say for the header how `auto` chose where documents are packed on a GPU; "" elsewhere."""
    if recipe.model.attention != "auto" or device.type != "cuda" or not packs_documents(recipe):
        return ""
    row = _table(path).get(torch.cuda.get_device_name(device))
    if row is None:
        return "auto: nothing measured on this GPU yet, see docs/gpu.md"
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["tokens_per_second"].items())
    return f"auto: measured {row['date'][:10]}, tokens/s: {rates}"


def _table(path: Path) -> Mapping[str, dict]:
    return json.loads(path.read_text(encoding="utf-8"))
