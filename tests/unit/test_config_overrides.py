"""model.overrides: the config that a run changes, against transformers' from_pretrained with the same fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_families import tiny_config
from transformers import AutoModelForCausalLM

from samecurve.config.loader import load_recipe
from samecurve.errors import ConfigurationError
from samecurve.models.config_overrides import with_overrides
from samecurve.models.skeleton import build_skeleton

THETA = 50_000.0
YARN = {"rope_type": "yarn", "factor": 4.0}
WHOLE_YARN = {**YARN, "rope_theta": THETA, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Returns the folder of a family's tiny model."""
    root = tmp_path_factory.mktemp("published")

    def folder(family: str) -> str:
        if not (root / family).exists():
            torch.manual_seed(0)
            config = tiny_config(family, max_position_embeddings=64, initializer_range=0.5)
            if family == "llama":
                config.rope_parameters["rope_theta"] = THETA
            AutoModelForCausalLM.from_config(config).save_pretrained(root / family)
        return str(root / family)

    return folder


def recipe(path: str, overrides: dict, *more: str):
    model = {"path": path, "overrides": overrides, "attention": "eager"}
    fields = {"model": model, "output_dir": "x", "optimizer": {"learning_rate": 1e-3}, "schedule": {"warmup_steps": 0}}
    fields["batch"] = {"sequence_length": 16}
    file = Path(path) / "recipe.yaml"
    file.write_text(json.dumps(fields | {"data": {"path": path}}))
    return load_recipe(str(file), more)


@pytest.mark.parametrize(
    ("family", "overrides", "theirs"),
    [
        ("llama", {"rope_parameters": YARN}, {"rope_parameters": WHOLE_YARN}),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"rope_parameters": WHOLE_YARN}),
        ("llama", {"rope_theta": 100.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        (
            "llama",
            {"max_position_embeddings": 256, "rope_parameters": YARN},
            {"max_position_embeddings": 256, "rope_parameters": WHOLE_YARN},
        ),
        ("mistral", {"sliding_window": 3}, {"sliding_window": 3}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_by_inverse_layer_idx": True}),
    ],
)
def test_logits_are_those_of_from_pretrained(family, overrides, theirs, published, tmp_path):
    path, ids = published(family), torch.arange(5, 45)[None]
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    expected = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **theirs)
    config = build_skeleton(recipe(path, overrides), 100).config
    config.save_pretrained(tmp_path)  # as the export does
    ours = AutoModelForCausalLM.from_pretrained(
        path, config=type(config).from_pretrained(tmp_path), attn_implementation="eager"
    )
    with torch.no_grad():
        before, want, found = (model.eval()(ids, use_cache=False).logits for model in (plain, expected, ours))
    assert (before - want).abs().max() > 1e-3
    assert torch.equal(found, want)


def test_rows_may_be_as_long_as_the_new_config_says(published):
    path = published("llama")
    with pytest.raises(ConfigurationError, match="max_position_embeddings"):
        build_skeleton(recipe(path, {}, "batch.sequence_length=128"), 100)
    overrides = {"max_position_embeddings": 256, "rope_parameters": YARN, "attention_dropout": 0.1}
    config = build_skeleton(recipe(path, overrides, "batch.sequence_length=128"), 100).config
    assert (config.attention_dropout, config.rope_parameters["original_max_position_embeddings"]) == (0.1, 64)


def test_overrides_replace_other_spellings_and_restore_no_quantization():
    config = tiny_config("ernie4_5_moe")
    fields = {**config.to_dict(), "num_experts_per_tok": 2, "quantization_config": {"quant_method": "fp8"}}
    del fields["moe_k"]
    changed = with_overrides(config, fields, {"num_experts_per_tok": 1}, {})
    assert changed.moe_k == 1 and "quantization_config" not in changed.to_dict()


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"atention_dropout": 0.1}, "overrides.atention_dropout: .* did you mean attention_dropout"),
        ("llama", {"rope_parameters": {"rope_type": "yarm"}}, "rope_type: found .yarm. .*, expected one of .*yarn"),
        (
            "llama",
            {"rope_parameters": {**YARN, "beta_fats": 1}},
            "rope_parameters.beta_fats: .* did you mean beta_fast",
        ),
        ("llama", {"rope_parameters": 4}, "rope_parameters: found 4, expected parameters such as rope_type"),
        ("gemma3_text", {"rope_parameters": YARN}, "expected parameters for .*sliding_attention"),
        ("llama", {"model_type": "qwen2"}, "overrides.model_type: the weights belong to the published family"),
        ("llama", {"dtype": "float16"}, "overrides.dtype: the recipe's precision sets it"),
        ("llama", {"rms_norm_eps": "small"}, "transformers refuses them"),
        (
            "llama",
            {"intermediate_size": 64, "attention_dropout": 0.1},
            r"^model.overrides.intermediate_size: found 64, which changes .*weight from \(48, 32\) to \(64, 32\); the",
        ),
        ("llama", {"num_hidden_layers": 1}, "num_hidden_layers: found 1, which changes .* to no weight"),
    ],
)
def test_overrides_that_are_refused(family, overrides, message, published):
    with pytest.raises(ConfigurationError, match=message) as caught:
        build_skeleton(recipe(published(family), overrides), 100)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.path=null", "model.config={model_type: llama}"], "write the fields into model.config"),
        (["adapter.name=lora"], "sliding_window would not be exported with an adapter"),
    ],
)
def test_overrides_that_have_no_place(more, message, published):
    with pytest.raises(ConfigurationError, match=message):
        recipe(published("mistral"), {"sliding_window": 3, "attention_dropout": 0.1}, *more)
