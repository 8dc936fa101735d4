"""A model cut into pipeline layers is the model: same logits, same gradients, same names."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_families import run_layers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from samecurve.errors import ConfigurationError
from samecurve.models.pipeline_split import PIPELINED, Decoder, TiedHead, last_scores, split_layers

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
CASES = {
    "llama": ("llama", COMMON),
    "mistral": ("mistral", {**COMMON, "sliding_window": None}),
    "mistral-window": ("mistral", {**COMMON, "sliding_window": 3}),
    "qwen2": ("qwen2", COMMON),
    "qwen2-window": ("qwen2", {**COMMON, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**COMMON, "head_dim": 16}),
    "gpt2": ("gpt2", GPT2),
}


def build(case: str, tied: bool, attention: str = "sdpa"):
    model_type, fields = CASES[case]
    config = AutoConfig.for_model(model_type, **fields, tie_word_embeddings=tied, attn_implementation=attention)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def packed_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 24 tokens: documents of 5, 11 and 8 tokens, and one of 24."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, 61, (2, 24), generator=generator)
    packed = torch.cat([torch.arange(5), torch.arange(11), torch.arange(8)])
    return input_ids, torch.stack([packed, torch.arange(24)])


def test_every_family_has_a_case():
    assert {model_type for model_type, _ in CASES.values()} == set(PIPELINED)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_sequential_layers_are_the_model(case, tied, attention):
    model = build(case, tied, attention).eval()
    input_ids, position_ids = packed_rows()
    cut_model = copy.deepcopy(model)
    layers = split_layers(cut_model)
    assert isinstance(layers[-1], TiedHead) == tied

    expected = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    logits = run_layers(layers, input_ids, position_ids)
    assert torch.equal(logits, expected)

    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (expected * weight).sum().backward()
    (logits * weight).sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), cut_model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_without_an_lm_head(case):
    """A classifier reads the last token that is not padding, wherever that is; a bare model returns hidden states."""
    model_type, fields = CASES[case]
    config = AutoConfig.for_model(model_type, **fields, pad_token_id=60, num_labels=3)
    input_ids = torch.randint(0, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    input_ids[0, 7:], input_ids[2, 1:] = 60, 60
    positions = torch.arange(12).expand(3, -1)
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    layers = split_layers(classifier)
    scores = last_scores(run_layers(layers, input_ids, positions), input_ids, 60)
    assert torch.equal(scores, classifier(input_ids=input_ids, use_cache=False).logits) and scores.shape == (3, 3)
    bare = AutoModel.from_config(config).eval()
    states = run_layers(split_layers(bare), input_ids, positions)
    assert torch.equal(states, bare(input_ids=input_ids, use_cache=False).last_hidden_state)
    for model, split in ((classifier, layers), (bare, split_layers(bare))):
        found = dict(pair for layer in split for pair in layer.named_weights())
        assert found.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("case", ["llama", "qwen2-window", "gpt2"])
def test_documents_of_a_packed_row_do_not_see_each_other(case):
    layers = split_layers(build(case, True).eval())
    input_ids, position_ids = packed_rows()
    other = input_ids.clone()
    other[0, :5] = (other[0, :5] + 1) % 61
    difference = (run_layers(layers, input_ids, position_ids) - run_layers(layers, other, position_ids)).abs().amax(-1)
    assert difference[0, :5].min() > 0
    assert difference[0, 5:].max() == 0


def test_second_micro_batch_gets_its_own_masks():
    model = build("llama", True).eval()
    layers = split_layers(model)
    input_ids, position_ids = packed_rows()
    run_layers(layers, input_ids, position_ids)
    flipped = position_ids.flip(0)
    expected = model(input_ids=input_ids, position_ids=flipped, use_cache=False).logits
    assert torch.equal(run_layers(layers, input_ids, flipped), expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_names_are_the_models(case, tied):
    model = build(case, tied)
    named = [pair for layer in split_layers(model) for pair in layer.named_weights()]
    expected = dict(model.named_parameters())
    assert {name: id(weight) for name, weight in named} == {name: id(weight) for name, weight in expected.items()}
    assert len(named) == len(expected) + tied


def test_a_cut_model_may_be_on_meta_and_be_filled_later():
    model = build("llama", False).eval()
    input_ids, position_ids = packed_rows()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    layers = split_layers(skeleton.eval())
    weights = dict(model.named_parameters())
    for layer in layers:
        layer.to_empty(device="cpu")
        for name, weight in layer.named_weights():
            weight.data.copy_(weights[name].data)
    expected = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    assert torch.equal(run_layers(layers, input_ids, position_ids), expected)


def test_one_pipeline_layer_per_decoder_layer():
    layers = split_layers(build("llama", True))
    assert [isinstance(layer, Decoder) for layer in layers] == [False, True, True, True, False, False]


def test_unknown_family_names_itself_and_the_known_ones():
    config = AutoConfig.for_model("opt", vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ConfigurationError,
        match="split a opt; .* families gpt2, llama, mistral, qwen2, qwen3",
    ):
        split_layers(model)
