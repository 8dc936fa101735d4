"""A pretrained model that comes without the task's head, and families whose attention is computed in one way alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from report_cases import missing
from test_console import FACTS
from test_tasks import BERT, made
from tiny_families import round_trip_config
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, BertForMaskedLM, BertModel

from samecurve.config import loader as recipes
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.metrics.console import header_lines
from samecurve.models import weights
from samecurve.models.attention.choice import choose_attention
from samecurve.models.skeleton import build_skeleton
from samecurve.tasks import registry

HEAD = {
    "cls.predictions.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
}


@pytest.fixture
def encoder(tmp_path):
    """A sentence encoder's folder: layers, and no head."""
    task = registry.load_task(made(tmp_path, task="mlm"))
    folder = tmp_path / "encoder"
    torch.manual_seed(0)
    BertModel(AutoConfig.for_model(**BERT, vocab_size=task.vocabulary_size)).save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    return folder


def recipe(tmp_path, folder, **settings) -> Recipe:
    own = {"path": str(folder), **settings}
    return made(tmp_path, task="mlm", model=own, tokenizer={"path": str(folder)})


def filled(settings: Recipe) -> tuple[object, dict[str, torch.Tensor]]:
    task, found = registry.load_task(settings), {}
    shape = build_skeleton(settings, task.vocabulary_size, task.special_tokens, task.head)
    weights.load_weights(shape, settings, lambda name, tensor: found.update({name: tensor.clone()}))
    return shape, found


def test_without_the_key_the_error_names_what_is_missing_and_the_key(tmp_path, encoder):
    with pytest.raises(ConfigurationError) as error:
        filled(recipe(tmp_path, encoder))
    text = str(error.value)
    assert text.startswith(
        f"model.path: {encoder} holds no tensor for cls.predictions.bias, cls.predictions.transform."
    )
    assert text.endswith("name a model that has it, or set model.new_head to true to make one")
    assert all(name in text for name in HEAD)


def test_a_new_head_is_drawn_by_name_and_the_rest_is_the_files(tmp_path, encoder):
    settings = recipe(tmp_path, encoder, new_head=True)
    shape, found = filled(settings)
    stored = BertModel.from_pretrained(encoder).state_dict()
    shared = {name for name in found if name.removeprefix("bert.") in stored}
    assert len(shared) > 30 and found.keys() - shared - {"bert.embeddings.position_ids"} >= HEAD
    assert all(torch.equal(found[name], stored[name.removeprefix("bert.")]) for name in shared)
    weight = found["cls.predictions.transform.dense.weight"]
    assert weight.std() == pytest.approx(0.02, rel=0.2)  # the config's initializer_range
    assert torch.equal(weight, filled(settings)[1]["cls.predictions.transform.dense.weight"])
    other = filled(settings.model_copy(update={"seed": 1}))[1]
    assert not torch.equal(weight, other["cls.predictions.transform.dense.weight"])
    assert set(weights.describe(shape, settings).new_head) == HEAD


def test_only_the_head_may_be_missing(tmp_path, encoder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(encoder / "model.safetensors")
    tensors.pop("encoder.layer.1.output.dense.weight")
    save_file(tensors, encoder / "model.safetensors")
    for settings in ({}, {"new_head": True}):
        with pytest.raises(
            ConfigurationError, match="holds no tensor for.*bert.encoder.layer.1.output.dense.weight"
        ) as e:
            filled(recipe(tmp_path, encoder, **settings))
        assert "new_head" not in str(e.value)


def test_a_head_that_is_there_is_not_replaced(tmp_path, encoder):
    BertForMaskedLM.from_pretrained(encoder).save_pretrained(encoder)
    with pytest.raises(ConfigurationError, match="model.new_head: found true, but .* has all tensors of a Bert"):
        filled(recipe(tmp_path, encoder, new_head=True))
    assert HEAD <= filled(recipe(tmp_path, encoder))[1].keys()


def test_an_untied_head_of_a_causal_model(tmp_path):
    config = round_trip_config("gpt_neox")
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    task = registry.load_task(made(tmp_path, task="mlm"))
    task.tokenizer.save_pretrained(tmp_path / "base")
    config.vocab_size = task.vocabulary_size
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    settings = made(tmp_path, task="pretrain", model={"path": str(tmp_path / "base"), "new_head": True},
                    tokenizer={"path": str(tmp_path / "base")})  # fmt: skip
    shape, found = filled(settings)
    assert weights.describe(shape, settings).new_head == ["lm_head.weight"]
    assert found["lm_head.weight"].std() == pytest.approx(0.02, rel=0.2)


FROM_SCRATCH = ["model.path=null"]
RULES = {
    "a model from scratch is new as a whole; set it to false": FROM_SCRATCH,
    "task embed uses no head; set it to false": ["task=embed"],
    "with an adapter the head of task mlm is frozen and would stay random; train the whole model": [
        "adapter.name=lora"
    ],
}


@pytest.mark.parametrize("expected", RULES)
def test_where_there_is_no_head_to_make(expected, encoder):
    given = [f"model.path={encoder}", "model.config=null", "tokenizer.vocabulary_size=null", "model.new_head=true"]
    keys = given[-1:] if RULES[expected] == FROM_SCRATCH else given
    with pytest.raises(ConfigurationError) as error:
        recipes.load_recipe("recipes/mlm.yaml", [*keys, *RULES[expected]])
    assert f"model.new_head: found true, but {expected}" in str(error.value)


# family, model.attention, what computes it, what the header says
ATTENTION = [
    ("bloom", "auto", "eager", "eager: transformers has no sdpa for a bloom"),
    ("gpt_oss", "auto", "eager", "eager: transformers has no sdpa for a gpt_oss"),
    ("bloom", "eager", "eager", "eager"),
    ("mamba", "auto", "eager", "none"),
    ("llama", "auto", "sdpa", "sdpa"),
    ("gpt2", "auto", "sdpa", "sdpa"),
]


@pytest.mark.parametrize(("family", "asked", "chosen", "shown"), ATTENTION)
def test_auto_takes_what_there_is_and_the_header_says_so(tmp_path, family, asked, chosen, shown):
    fields = {"model_type": family, "num_hidden_layers": 2, "hidden_size": 192}
    settings = made(tmp_path, task="pretrain", model={"config": fields, "attention": asked})
    settings = settings.model_copy(update={"precision": "fp32"})
    shape = build_skeleton(settings, 300)
    assert shape.config._attn_implementation == chosen
    described = weights.describe(shape, settings)
    plan = replace(FACTS.plan, recipe=settings)
    assert dict(header_lines(replace(FACTS, plan=plan, model=described)))["attention"] == shown


@pytest.mark.parametrize("asked", ["sdpa", "flash_attention_2", "flex_attention"])
def test_an_implementation_that_the_family_lacks_is_refused_with_the_fix(tmp_path, asked):
    settings = made(tmp_path, task="pretrain", model={"config": {"model_type": "bloom"}, "attention": asked})
    with pytest.raises(ConfigurationError) as error:
        build_skeleton(settings, 300)
    assert not missing(str(error.value), (f"model.attention: found {asked}", "bloom", "use eager or auto"))


def test_every_causal_family_has_what_auto_takes():
    """Built by transformers with what was chosen."""
    asked = Recipe.model_construct(model=made_model("auto"), precision="fp32")
    for family in ("bloom", "gptj", "gpt_oss", "mamba", "llama", "jetmoe", "mpt", "falcon"):
        config = round_trip_config(family)
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
        config._attn_implementation = choose_attention(asked, config, model_class)
        with torch.device("meta"):
            assert model_class(config).config._attn_implementation == config._attn_implementation


def made_model(attention: str):
    from samecurve.config.schema import Model

    return Model(attention=attention)
