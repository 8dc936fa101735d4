"""A model of two small layers of every family that may be packed and of others, for tests that go over families."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from samecurve.models.pipeline_split import Layer
from samecurve.specs.model_families import ROUND_TRIP

MOE = {"moe_intermediate_size": 16, "num_experts": 4, "shared_expert_intermediate_size": 16}
WINDOW = {"sliding_window": 6}
# Experts by each family's own names; a config takes names that its family does not have.
EXPERTS = {
    **{"moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT = {**LATENT, "num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
FIELDS = {
    "mistral": WINDOW,
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    # by default 262,144 rows of 256 numbers for each layer: 134 million parameters
    "gemma4_text": {"vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "qwen2_moe": MOE,
    "qwen3_moe": {**MOE, "num_experts_per_tok": 2, "head_dim": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "gemma3n_text": {"vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    "modernbert-decoder": {"cls_token_id": 1, "sep_token_id": 2},
    **dict.fromkeys(
        ("cohere2_moe", "dots1", "exaone_moe", "flex_olmo", "glm4_moe", "minimax_m2", "solar_open"), EXPERTS
    ),
    **dict.fromkeys(
        ("hy_v3", "laguna", "mellum", "granitemoe_swa", "mimo_v2_flash", "flint", "beam", "kolibri1"), EXPERTS
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1"), {**EXPERTS, **LATENT}),
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
    # kept apart by models/packed_rows.py
    "afmoe": {**EXPERTS, "layer_types": ["sliding_attention", "full_attention"], **WINDOW},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, **WINDOW},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16, **MAMBA},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 64, **MAMBA},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4, "head_dim": 8},
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
        **{**EXPERTS, "moe_shared_expert_intermediate_size": 16},
    },
    **dict.fromkeys(("lfm2", "lfm3"), {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    **dict.fromkeys(
        ("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), {**MOE, **DELTA, "num_experts_per_tok": 2}
    ),
    # recurrent, not packed
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    **dict.fromkeys(("falcon_mamba", "mamba"), {"state_size": 8, "time_step_rank": 4}),
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "minimax": {**EXPERTS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 64, "lru_width": 32},
    "kimi_linear": {**EXPERTS, **LATENT, **DELTA, "linear_num_heads": 2, "linear_head_dim": 8},
    "bailing_hybrid": {**EXPERTS, **LATENT, **DELTA},
}
HEAD_DIM = {"ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "helium"}
HEAD_DIM |= {
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "llama4_text",
    "ministral",
    "ministral3",
    "qwen3",
    "seed_oss",
    "vaultgemma",
}
TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# Families whose stored tensors are not their parameters: other names (renamed) or other parts (merged, concatenated).
STORED_OTHERWISE = """
aria_text flex_olmo gpt_neox granitemoe granitemoeshared hunyuan_v1_moe jamba mixtral olmo_hybrid olmoe phimoe qwen2_moe
qwen3_moe
""".split()
STORED_ALIKE = """
bloom cohere falcon gemma2 gemma3_text gpt2 gpt_oss gptj jetmoe llama mamba mistral mpt olmo2 opt phi3 qwen2 qwen3
stablelm
""".split()
# Families with a router's bias or other constants, in buffers or, of afmoe, ernie4_5_moe and laguna, in parameters.
CONSTANTS = """
afmoe apertus axk1 deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5_moe exaone_moe gemma4_text glm4_moe
glm4_moe_lite glm_moe_dsa hy_v3 kimi_linear kolibri1 laguna lfm2_moe longcat_flash mimo_v2_flash minimax minimax_m2
nemotron_h solar_open zaya
""".split()
# Sizes of parts that only some families have.
SMALL = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "embedding_size": 16,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
}
# Encoders, as masked language models.
ENCODERS = ["bert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "roformer"]
OTHERS = sorted(ROUND_TRIP.difference(STORED_OTHERWISE, STORED_ALIKE, CONSTANTS, ENCODERS))
MORE_FIELDS = {  # and no dropout or noise: masks are drawn per process
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "mixtral": {"num_local_experts": 8, "num_experts": 8},  # two names of one field
    "opt": {"dropout": 0.0, "ffn_dim": 48},
    "deepseek_v4": {
        "head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe"],
        "num_key_value_heads": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "longcat_flash": {
        "num_layers": 1,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
        "ffn_hidden_size": 48,
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 16},
    **dict.fromkeys(
        ("kimi_linear", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "num_local_experts": 16, "num_experts": 16},
    "gpt_oss": {
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 6,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "granitemoeshared": {"shared_intermediate_size": 16},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "modernbert": {"global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    "mpnet": {"max_position_embeddings": 64},
}


def skip_unknown(family: str) -> None:
    """Skip the test if transformers is older than the family."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")


def round_trip_config(family: str) -> PreTrainedConfig:
    """Of ROUND_TRIP; with fields that the family has."""
    skip_unknown(family)
    known = AutoConfig.for_model(family)
    given = {**COMMON, **TOKENS, **SMALL}
    if hasattr(known, "kv_lora_rank"):
        given["num_key_value_heads"] = 4
    if family == "gemma4_text":  # has another width in layers of another kind
        del given["head_dim"]
    computed = {name for name in given if isinstance(getattr(type(known), name, None), property)}
    given = {name: value for name, value in given.items() if hasattr(known, name) and name not in computed}
    return AutoConfig.for_model(family, **given | FIELDS.get(family, {}) | MORE_FIELDS.get(family, {}))


def tiny_config(family: str, **fields) -> PreTrainedConfig:
    """4 heads of 8 in all of them, so as wide as the 32 numbers of a token."""
    skip_unknown(family)
    heads = {"head_dim": 8} if family in HEAD_DIM else {}
    return AutoConfig.for_model(family, **COMMON | TOKENS | heads | FIELDS.get(family, {}) | fields)


def run_layers(layers: list[Layer], input_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Run a model's pipeline layers in sequence: its logits, (rows, sequence_length, vocabulary_size)."""
    flow = layers[0]((input_ids, position_ids))
    for layer in layers[1:]:
        flow = layer(flow)
    return flow


# Packaged models that transformers 5.23 builds small, by name of the family or of the family and its text part;
# gemma3n's tower would need timm.
PACKAGED = """
aria deepseek_vl gemma3 gemma4 gemma4_unified got_ocr2 idefics3 internvl internvl:qwen3 lfm2_vl llama4 llava
llava_next llava_onevision mistral3 mistral3:ministral3 paligemma qwen2_5_vl qwen2_vl
qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
""".split()
_PARTS = {  # of a text part and of towers
    **{**COMMON, **TOKENS, "head_dim": 8, "global_head_dim": 8, "embed_dim": 32, "out_hidden_size": 32},
    **{"projection_dim": 32, "mm_hidden_size": 32, "vision_output_dim": 32, "output_proj_dims": 32, "mm_embed_dim": 32},
    **{"projector_input_dim": 32, "projector_output_dim": 32, "output_channels": 32, "intermediate_size_mlp": 48},
    **{"depth": 2, "num_heads": 4, "image_size": 28, "patch_size": 14, "num_position_embeddings": 16},
    **{"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "pixel_shuffle_ratio": 0.5},
    **{"vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"moe_num_experts": 4, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "no_rope_layers": None},
}


def gradients(model) -> dict[str, Tensor]:
    """Copies of the gradients, which are dropped."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def packaged_config(name: str) -> PreTrainedConfig:
    """Of PACKAGED; every part of it is small."""
    family, _, text = name.partition(":")
    packaged: Any = CONFIG_MAPPING[family]
    default, fields = packaged(), {}
    for key, owner in packaged.sub_configs.items():
        value = getattr(default, key)
        part = owner if value is None else type(value)
        if key == "text_config" and text:
            part = CONFIG_MAPPING[text]
        known = part().to_dict()
        fields[key] = {name: value for name, value in _PARTS.items() if name in known}
        if kinds := list(dict.fromkeys(known.get("layer_types") or ())):
            fields[key]["layer_types"] = [kinds[0], kinds[-1]]
        if "vl" in part.model_type.split("_") and "rope_parameters" in known:
            rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            fields[key]["rope_parameters"] = rope
        fields[key]["model_type"] = part.model_type
    known = vars(default)
    fields |= {name: 90 + index for index, name in enumerate(known) if name.endswith(("_token_id", "_token_index"))}
    fields |= {name: value for name, value in {**TOKENS, "projection_dim": 32}.items() if name in known}
    return packaged(**fields)
