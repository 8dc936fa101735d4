"""A model of two small layers of every family that may be packed and of others, for tests that go over families."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from samecurve.models.pipeline_split import Layer

MOE = {"moe_intermediate_size": 16, "num_experts": 4, "shared_expert_intermediate_size": 16}
WINDOW = {"sliding_window": 6}
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
}
HEAD_DIM = {"ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "helium"}
HEAD_DIM |= {"hunyuan_v1_dense", "llama4_text", "ministral3", "qwen3", "seed_oss", "vaultgemma"}
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
# Encoders, as masked language models.
ENCODERS = ["bert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "roformer"]
MORE_FIELDS = {  # and no dropout or noise: masks are drawn per process
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "granitemoeshared": {"shared_intermediate_size": 16},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "modernbert": {"global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    "mpnet": {"max_position_embeddings": 64},
}


def round_trip_config(family: str) -> PreTrainedConfig:
    """Of STORED_OTHERWISE, STORED_ALIKE and ENCODERS; with fields that the family has."""
    known = AutoConfig.for_model(family)
    given = {**COMMON, **TOKENS, "moe_intermediate_size": 16, "embedding_size": 16, "max_position_embeddings": 64}
    given = {name: value for name, value in given.items() if hasattr(known, name)}
    return AutoConfig.for_model(family, **given | FIELDS.get(family, {}) | MORE_FIELDS.get(family, {}))


def tiny_config(family: str, **fields) -> PreTrainedConfig:
    """4 heads of 8 in all of them, so as wide as the 32 numbers of a token."""
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
aria gemma3 gemma4 gemma4_unified got_ocr2 idefics3 internvl internvl:qwen3 llama4 llava llava_next llava_onevision
mistral3 mistral3:ministral3 paligemma qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
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
