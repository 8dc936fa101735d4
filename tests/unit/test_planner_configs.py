"""Configs of published models: what `plan` reads, and what it refuses because its formulas do not cover it."""

from __future__ import annotations

import json

import pytest
from test_plan_search import LLAMA_8B

from samecurve.cli.commands import main
from samecurve.errors import ConfigurationError
from samecurve.planner import activations, inputs, kernels, model_shape, strategies
from samecurve.planner.cluster import read_cluster
from samecurve.planner.hardware import gpu, profile

MIXTURE = {**LLAMA_8B, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048}
MIXTURE |= {"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_hidden_layers": 48}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"enable_moe_block": True}, "experts beside a dense MLP"),
        ({"num_kv_shared_layers": 20}, "keys and values of other layers"),
        ({"use_double_wide_mlp": True}, "MLPs of two widths"),
        ({"attn_type_list": [0, 1]}, "linear attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_layers_that_the_formulas_do_not_cover(fields, kind):
    with pytest.raises(ConfigurationError, match=f"the formulas do not cover {kind}"):
        model_shape.shape({**LLAMA_8B, **fields}, "config.json")
    inert = {"enable_moe_block": False, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    usual = ["full_attention", "sliding_attention", "chunked_attention"]
    model_shape.shape({**LLAMA_8B, **inert, "layer_types": usual}, "config.json")


@pytest.mark.parametrize(
    ("text", "heads", "parameters"),
    [
        ({"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}, (8, 4), 3.88e9),
        (
            {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16}
            | {"num_key_value_heads": 8},
            (16, 8),
            11.77e9,
        ),
    ],
)
def test_gemma_3_as_published(text, heads, parameters, tmp_path):
    """Its config leaves out what is the default of transformers' class."""
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **text}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (tmp_path, tmp_path / "config.json"):
        shape = inputs.read(str(name), []).shape
        assert (shape.heads, shape.kv_heads) == heads and shape.vocab == 262_208 and shape.tied
        assert shape.parameters == pytest.approx(parameters, rel=0.002)


def test_falcon_has_its_own_name_for_key_heads():
    falcon = {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128}
    falcon |= {"vocab_size": 65024, "num_kv_heads": 8, "new_decoder_architecture": True, "multi_query": True}
    assert model_shape.shape(falcon, "config.json").kv_heads == 8
    older = {**falcon, "num_kv_heads": 128, "new_decoder_architecture": False}
    assert model_shape.shape(older, "config.json").kv_heads == 1


def problems(fields: dict, strategy: str, sizes: dict, gpus: int, tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    request = inputs.read(str(tmp_path / "config.json"), ["batch.sequence_length=8192"])
    _, refused = strategies.describe(request, strategies.read(f"configs/{strategy}.yaml"), sizes, gpus)
    return "; ".join(f"{problem.key}: {problem.text}" for problem in refused)


def test_ulysses_divides_the_heads(tmp_path):
    nine = {**LLAMA_8B, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    refused = problems(nine, "fsdp_ulysses", {"cp": 2}, 8, tmp_path)
    assert (
        "parallelism_config_sp_size: found 2, but the model has 9 attention heads, which 2 does not divide" in refused
    )
    assert not problems(LLAMA_8B, "fsdp_ulysses", {"cp": 2}, 8, tmp_path)
    assert not problems(nine, "fsdp_cp", {"cp": 2}, 8, tmp_path)  # gathers keys, and divides no heads


def test_experts_are_divided_over_the_ranks_that_hold_them(tmp_path):
    """On 24 GPUs, 12 ranks hold the same 64 of 128 experts, of 1,536 and of 2,048 rows; 12 divides 1,536 alone."""
    refused = problems(MIXTURE, "fsdp_ep", {"ep": 2}, 24, tmp_path)
    text = "parallelism_config_ep_size: found 2, but 12 ranks hold the same 64 experts of 2048 rows"
    assert f"{text}, and 12 divides neither" in refused
    assert not problems(MIXTURE, "fsdp_ep", {"ep": 2}, 16, tmp_path)


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


def test_rows_are_as_long_as_the_model_has_positions(tmp_path):
    """Without a recipe; 4,096 tokens at most, and what is written is what was planned."""
    path, folder = tmp_path / "config.json", tmp_path / "plan"
    for fields, length in ((GPT2, 1024), (LLAMA_8B | {"max_position_embeddings": 131072}, 4096), (LLAMA_8B, 4096)):
        path.write_text(json.dumps(fields))
        assert inputs.read(str(path), []).batch.sequence_length == length
    path.write_text(json.dumps(GPT2))
    command = ["plan", str(path), "--cluster", "h100x8", "--output", str(folder), "--launcher", "torchrun"]
    assert main(command) == 0
    assert "sequence_length: 1024" in (folder / "recipe.yaml").read_text()


def test_overrides_of_a_model_without_a_recipe(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert inputs.read(str(tmp_path / "config.json"), ["model.config.num_hidden_layers=2"]).shape.layers == 2
    assert inputs.read(str(tmp_path), ["model.overrides={vocab_size: 512}"]).shape.vocab == 512


def limits(folder, *overrides: str) -> list[str]:
    return inputs.left_out(inputs.read(str(folder), overrides), gpu("H100"))


def test_what_is_not_in_the_numbers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"sliding_window": 1024}))
    for overrides, text in (
        (["optimizer.name=muon"], "optimizer.name muon. The products that orthogonalise"),
        (["model.attention=varlen"], "sliding_window 1024. Attention is counted as over whole rows"),
    ):
        told = limits(tmp_path, *overrides)
        assert any(line.startswith(text) for line in told), told
    for quiet in (["model.attention=sdpa"], ["model.attention=varlen", "batch.sequence_length=1024"]):
        assert not limits(tmp_path, *quiet)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"model_type": "phi3"}))
    assert "model_type phi3. Tensor parallelism is counted as if it divided" in limits(tmp_path)[0]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"sliding_window": 9, "use_sliding_window": False}))
    assert not limits(tmp_path, "model.attention=varlen")


def test_the_busiest_experts_set_the_pace(tmp_path, monkeypatch):
    """Some rank's experts get 1.2 times the mean, which its memory and its exchange count, too."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    request, template = inputs.read(str(tmp_path), []), strategies.read("configs/fsdp_ep.yaml")
    described, _ = strategies.describe(request, template, {"ep": 8}, 8)
    job, constants = strategies.job(request, described, read_cluster("h100x8")), profile("fsdp2")
    seconds = kernels.layer(job, constants).forward
    monkeypatch.setattr(activations, "EXPERT_IMBALANCE", 1.0)
    even = kernels.layer(job, constants).forward
    up, down = (kernels.product_seconds(job, job.tokens / 2, *size, constants) for size in ((2048, 1536), (768, 2048)))
    assert seconds - even > 0.19 * 16 * (up + down)
