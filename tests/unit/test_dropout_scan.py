"""Each family of transformers drops the same values however a batch is split, or is refused by name.

The configs are made small by the names of their fields; a family that cannot be built in this way is not judged.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.models.auto import modeling_auto

from samecurve.errors import ConfigurationError
from samecurve.models import dropout

CPU = torch.device("cpu")
KINDS = {
    AutoModelForCausalLM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    AutoModelForMaskedLM: modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    AutoModelForSequenceClassification: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
MOST_PARAMETERS = 3_000_000
ROWS, LENGTH, RATE = 6, 8, 0.2
WRONG = ("drops otherwise", "draws from torch's generator", "fails")
# The first pattern that matches a field's whole name gives its value.
SMALL = {
    r"vocab_size|.*_vocab_size|vocabulary_size": 100,
    r"(num_|n_)?(key_value|kv)_heads|num_key_value_heads|multi_query_group_num|num_attention_groups": 2,
    r"(num_|n_|encoder_|decoder_)?(attention_)?heads?|num_attention_heads|.*_num_heads": 4,
    r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_decoder_layers|num_encoder_layers": 2,
    r"head_dim|d_head|d_kv|v_head_dim|qk_nope_head_dim|kv_channels|attention_head_size|swa_head_dim|global_head_dim": 8,
    r"qk_rope_head_dim|rotary_dim|index_head_dim": 4,
    r"qk_head_dim": 12,
    r"q_lora_rank|kv_lora_rank|o_lora_rank": 16,
    r"(moe_|shared_|shared_expert_)?intermediate_size.*|.*ffn_dim|ffn_hidden_size|n_inner|d_ff|d_inner|hidden_dim": 48,
    r"(.*_)?hidden_size|d_model|n_embd|dim|emb_dim|embedding_size|word_embed_proj_dim|embed_dim|lru_width|d_embed": 32,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len.*|max_sequence_length": 64,
    r"num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|top_k_experts|moe_top_k|router_topk": 2,
    r"(num_|n_)(local_|routed_)?experts|moe_num_experts": 4,
    r"n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts|first_k_dense_replace": 1,
    r"sliding_window|attention_window|local_attention|window_size": 4,
    r"pad_token_id": 0,
    r"bos_token_id|cls_token_id": 1,
    r"eos_token_id|sep_token_id|decoder_start_token_id": 2,
    r"mamba_n_heads|mamba_num_heads": 8,
    r"mamba_d_state|state_size|ssm_state_size|mamba_d_ssm": 8,
    r"mamba_dt_rank|time_step_rank": 4,
    r"num_labels": 2,
}


def is_rate(name: str, value: Any) -> bool:
    named = "dropout" in name or name.endswith("pdrop")
    return named and isinstance(value, (int, float)) and not isinstance(value, bool)


def shrunk(config: Any) -> dict[str, Any]:
    """Fields of a small model of the same family, all of whose dropout rates are RATE."""
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if is_rate(name, value):
            found[name] = RATE
            continue
        number = isinstance(value, int) and not isinstance(value, bool)
        matching = (small for pattern, small in SMALL.items() if re.fullmatch(pattern, name))
        small = next(matching, None) if number or value is None and name.endswith("token_id") else None
        if small is not None:
            found[name] = small
    layers = found.get("num_hidden_layers", 2)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_types"):
        value = getattr(config, name, None)
        if isinstance(value, list) and value and isinstance(value[0], str):
            kinds = list(dict.fromkeys(value))
            found[name] = (kinds * layers)[:layers]
    return found


def built(kind: type, family: str) -> nn.Module | None:
    """A small model, None if it cannot be made small by names alone."""
    try:
        known = AutoConfig.for_model(family)
        config = AutoConfig.for_model(family, **shrunk(known))
        config.num_labels = 2
        with torch.device("meta"):
            size = sum(each.numel() for each in kind.from_config(copy.deepcopy(config)).parameters())
        if size > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        model = kind.from_config(config).train()
        if "input_ids" not in inspect.signature(model.forward).parameters:
            return None
        with torch.no_grad():
            return model if model.eval()(**inputs()).logits.isfinite().all() else None
    except Exception:  # a family of which the names say too little
        return None


def inputs(rows: slice = slice(ROWS)) -> dict[str, torch.Tensor]:
    tokens = (torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7) % 90 + 5
    return {"input_ids": tokens[rows]}


def is_same_in_parts(logits: Callable[[slice], torch.Tensor]) -> bool:
    whole, parts = logits(slice(ROWS)), torch.cat([logits(slice(first, first + 2)) for first in range(0, ROWS, 2)])
    return parts.shape == whole.shape and torch.allclose(parts, whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def verdict(kind: type, family: str) -> str:
    model = built(kind, family)
    if model is None:
        return "not built"
    if not dropout.rates(model.config):
        return "without dropout"
    if not is_same_in_parts(lambda rows: model.eval()(**inputs(rows)).logits):
        return "rows depend on each other without dropout, too"  # such as experts of a fixed capacity
    without, before = model.eval()(**inputs()).logits, torch.get_rng_state()
    try:
        keys = dropout.install(model.train(), 5, CPU)

        def logits(rows: slice) -> torch.Tensor:
            batch = SimpleNamespace(inputs=inputs(rows), step=4, places=torch.arange(ROWS)[rows])
            with keys.micro_batch(batch):
                return model.train()(**batch.inputs).logits

        if not is_same_in_parts(logits):
            return WRONG[0]
        if not torch.equal(torch.get_rng_state(), before):
            return WRONG[1]
        return "drops nothing" if torch.allclose(logits(slice(ROWS)), without) else "drops alike"
    except ConfigurationError as error:
        return "refused" if "model.config" in str(error) else f"{WRONG[2]}: {error}"
    except Exception as error:
        return f"{WRONG[2]}: {error!r}"


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_family_drops_alike_or_is_refused(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {family: verdict(kind, family) for family in KINDS[kind]}
    for name, number in Counter(found.values()).most_common():
        print(number, name, *(family for family, each in found.items() if each == name))
    assert not {family: each for family, each in found.items() if each.startswith(WRONG)}
    assert list(found.values()).count("drops alike") >= 0.6 * len(found)
