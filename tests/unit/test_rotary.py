"""Rotary embeddings whose angles depend on the micro-batch."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from samecurve.errors import ConfigurationError
from samecurve.models.packed_rows import check_packing

LIMIT = 16  # original_max_position_embeddings
SCALED = {"factor": 4.0, "original_max_position_embeddings": LIMIT}
ROPE = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": SCALED,
    "llama3": {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {**SCALED, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}
MSCALE = {"short_mscale": 1.0, "long_mscale": 1.3}


def tiny(model_type: str, rope_type: str, **more: float) -> PreTrainedConfig:
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE[rope_type], **more}
    return AutoConfig.for_model(
        model_type, vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, original_max_position_embeddings=LIMIT, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, rope_parameters=parameters, initializer_range=0.5,
    )  # fmt: skip


@torch.no_grad()
def effect_of_neighbour(config: PreTrainedConfig, length: int) -> float:
    """Return the largest change of a packed row's logits when a row of one long document is beside it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    input_ids = (torch.arange(2 * length).reshape(2, length) * 7) % 90 + 5
    position_ids = torch.stack([torch.arange(length), torch.arange(length) % 12])
    beside = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits[1]
    alone = model(input_ids=input_ids[1:], position_ids=position_ids[1:], use_cache=False).logits[0]
    return (beside - alone).abs().max().item()


CASES = [("llama", rope_type, {}) for rope_type in ROPE] + [("phimoe", "longrope", MSCALE)]


@pytest.mark.parametrize(("family", "rope_type", "more"), CASES)
def test_packed_rows_do_not_depend_on_the_rows_beside_them(family, rope_type, more):
    config = tiny(family, rope_type, **more)
    check_packing(config, True, LIMIT)
    assert effect_of_neighbour(config, LIMIT) < 1e-5
    if rope_type != "longrope":
        check_packing(config, True, 32)
        assert effect_of_neighbour(config, 32) < 1e-5
        return
    assert effect_of_neighbour(config, 32) > 1e-3  # when this fails because transformers has changed, allow it
    check_packing(config, False, 32)
    text = r"data.packing: .* batch.sequence_length \(32\) is above original_max_position_embeddings \(16\)"
    with pytest.raises(ConfigurationError, match=text):
        check_packing(config, True, 32)


def test_longrope_of_some_layers_is_refused():
    by_layer = {
        "full_attention": {"rope_type": "longrope", "rope_theta": 1e6, **ROPE["longrope"]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = AutoConfig.for_model("gemma3_text", head_dim=8, rope_parameters=by_layer)
    check_packing(config, True, LIMIT)
    with pytest.raises(ConfigurationError, match="longrope"):
        check_packing(config, True, LIMIT + 1)
