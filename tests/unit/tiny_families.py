"""A model of two small layers of every family that may be packed, for tests that go over all of them."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

MOE = {"moe_intermediate_size": 16, "num_experts": 4, "shared_expert_intermediate_size": 16}
WINDOW = {"sliding_window": 6}
FIELDS = {
    "mistral": WINDOW,
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "qwen2_moe": MOE,
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


def tiny_config(family: str, **fields) -> PreTrainedConfig:
    """4 heads of 8 in all of them, so as wide as the 32 numbers of a token."""
    heads = {"head_dim": 8} if family in HEAD_DIM else {}
    return AutoConfig.for_model(family, **COMMON | TOKENS | heads | FIELDS.get(family, {}) | fields)
