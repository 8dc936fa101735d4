"""Adapters that peft has made and stored, and that training goes on with; other adapted weights than linear layers'."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file, save_file
from test_lora_model import IDS, adapted_recipe, filled, moved, write
from test_weights import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM

from samecurve.config import loader
from samecurve.config.schema import Optimizer
from samecurve.errors import ConfigurationError
from samecurve.models.flops import token_flops
from samecurve.models.lora import trained_shapes
from samecurve.models.skeleton import build_skeleton
from samecurve.optim.parameter_groups import parameter_groups, roles_of

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
MODELS = {
    "llama": FAMILIES["llama"],
    "llama_tied": FAMILIES["llama_tied"],
    "gpt2": FAMILIES["gpt2"],
    "qwen3_moe": {**FAMILIES["qwen3"], "model_type": "qwen3_moe", **EXPERTS},
    "mixtral": {**FAMILIES["llama"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
QV = {"target_modules": ["q_proj", "v_proj"]}
# what peft trained -> the model and peft's settings
STORED = {
    "lora": ("llama", QV),
    "rslora": ("llama", {**QV, "use_rslora": True}),
    "dora": ("llama", {"target_modules": "all-linear", "use_dora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "ranks": ("llama", {**QV, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "layers": ("llama", {**QV, "layers_to_transform": [1]}),
    "excluded": ("llama", {"target_modules": "all-linear", "exclude_modules": ["up_proj"]}),
    "embeddings": ("llama", {**QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "norms": ("llama", {**QV, "modules_to_save": ["norm"]}),
    "tied": ("llama_tied", {**QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "experts": ("qwen3_moe", {**QV, "target_parameters": STACKS}),
    "experts alone": ("mixtral", {"target_modules": [], "target_parameters": STACKS[:1]}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, fields in MODELS.items():
        torch.manual_seed(1)
        given = {key: value for key, value in fields.items() if key != "model_type"}
        made[name] = tmp_path_factory.mktemp(name) / "base"
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields["model_type"], vocab_size=64, **given))
        model.save_pretrained(made[name])
    return made


def stored_by_peft(base, folder, **settings):
    """Store an adapter that has moved from its start; returns peft's model."""
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    model = moved(get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    model.save_pretrained(str(folder))
    return model


def settled(base, folder, *overrides):
    """The recipe that goes on, as a user would write it."""
    path = folder.parent / "recipe.yaml"
    path.write_text(
        f"steps: 1\noutput_dir: out\ndata: {{path: {base}}}\nbatch: {{global_batch_size: 8, sequence_length: 16}}\n"
    )
    return loader.read_recipe(str(path), [f"adapter.path={folder}", "optimizer.learning_rate=1e-3", *overrides])


@pytest.mark.parametrize("case", STORED)
def test_goes_on_as_peft_evaluates_and_peft_reads_the_export(folders, case, tmp_path):
    family, settings = STORED[case]
    base = folders[family]
    peft = stored_by_peft(base, tmp_path / "old", **settings)
    source = settled(base, tmp_path / "old")
    assert source.document.problems == [] and source.recipe.model.path == str(base)
    made = adapted_recipe(base)
    made.adapter = source.recipe.adapter
    model = filled(made).eval()
    torch.testing.assert_close(model(IDS).logits, peft(IDS).logits, rtol=1e-6, atol=1e-6)
    ours = sum(shape.numel() for shape in trained_shapes(build_skeleton(made, 64)).values())
    theirs = {id(p): p.numel() for p in peft.parameters() if p.requires_grad}
    assert ours == sum(theirs.values())
    write(moved(model), tmp_path / "new")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "new").eval()
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-6)
    assert (loaded(IDS).logits - peft(IDS).logits).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["target_parameters", "modules_to_save"])
def test_a_new_adapter_starts_as_its_base(folders, name):
    value = {"target_parameters": tuple(STACKS), "modules_to_save": ("embed_tokens", "lm_head")}[name]
    base = folders["qwen3_moe"]
    made = adapted_recipe(base, target_modules=("q_proj",), **{name: value})
    model = filled(made).eval()
    reference = AutoModelForCausalLM.from_pretrained(base).eval()
    torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, rtol=1e-5, atol=1e-6)
    config = LoraConfig(r=4, target_modules=["q_proj"], **{name: list(value)})
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    theirs = {n.replace("modules_to_save.default.", "") for n, p in peft.named_parameters() if p.requires_grad}
    assert {f"base_model.model.{n}" for n in trained_shapes(build_skeleton(made, 64))} == theirs


def test_flops_of_adapted_experts(folders):
    """By hand: 2 layers, matrices of rank 4 of 2 active experts: 32 to 2 x 16, and 16 to 32."""
    plain, adapted = (
        token_flops(build_skeleton(adapted_recipe(folders["qwen3_moe"], target_modules=("q_proj",), **more), 64), 16, 0)
        for more in ({}, {"target_parameters": tuple(STACKS)})
    )
    assert adapted.model - plain.model == 6 * 2 * 2 * 4 * ((32 + 32) + (16 + 32))


def test_loraplus_groups_are_pefts(folders):
    whole = ("lm_head", "model.norm")
    made = adapted_recipe(folders["llama"], dora=True, modules_to_save=whole, loraplus_lr_ratio=16.0)
    shape, model, ours = build_skeleton(made, 64), filled(made), {}
    groups = parameter_groups(model.named_parameters(), Optimizer(learning_rate=1e-3), roles_of(shape))
    for group in groups:
        names = [name for name, p in model.named_parameters() if any(p is other for other in group["params"])]
        ours |= dict.fromkeys(names, 1e-3 * group.get("rate_factor", 1.0))
    config = LoraConfig(r=4, target_modules="all-linear", use_dora=True, modules_to_save=[*whole])
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(folders["llama"]), config)
    optimizer = create_loraplus_optimizer(peft, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    theirs = {
        name.removeprefix("base_model.model.").replace("modules_to_save.default.", ""): rates[id(p)]
        for name, p in peft.named_parameters()
        if p.requires_grad
    }
    assert ours == theirs and set(ours.values()) == {1e-3, 1.6e-2}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["adapter.rank=16"], "adapter.rank: found 16, but the adapter in {0} has r 4"),
        (["adapter.target_modules=[q_proj]"], "adapter.target_modules: found [q_proj], but the adapter in {0} has"),
        (["adapter.dora=true"], "adapter.dora: found true, but the adapter in {0} has use_dora false"),
        (["model.path={0}", "adapter.path=elsewhere"], "model.path: found {0}, which is an adapter, but adapter.path"),
        (["adapter.path={1}"], "adapter.path: {1}/adapter_config.json: no such file"),
    ],
)
def test_recipes_that_contradict_the_folder(folders, tmp_path, overrides, text):
    base, old = folders["llama"], tmp_path / "old"
    stored_by_peft(base, old, **QV)
    source = settled(base, old, *(override.format(old, base) for override in overrides))
    problems = [f"{problem.key}: {problem.text}" for problem in source.document.problems]
    assert any(line.startswith(text.format(old, base)) for line in problems), problems


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"peft_type": "IA3"}, "an adapter of peft's kind IA3"),
        ({"bias": "all"}, "trained with bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"r": 8}, "(4, 32), this model's (8, 32)"),
        ({"target_modules": ["q_proj"]}, "also has base_model.model.model.layers.0.self_attn.v_proj"),
        ({"modules_to_save": ["lm_head"]}, "has no base_model.model.lm_head.weight"),
        ({"base_model_name_or_path": "/gone"}, "no such folder: /gone"),
        ("bin", "adapter_model.bin is a pickle"),
        ("nan", "1 of 128 values are NaN"),
    ],
    ids=str,
)
def test_adapters_that_cannot_go_on(folders, tmp_path, change, text):
    base, old = folders["llama"], tmp_path / "old"
    stored_by_peft(base, old, **QV)
    weights = old / "adapter_model.safetensors"
    if change == "bin":
        weights.rename(old / "adapter_model.bin")
    elif change == "nan":
        tensors = load_file(weights)
        next(iter(tensors.values()))[0, 0] = torch.nan
        save_file(tensors, weights, {"format": "pt"})
    else:
        config = json.loads((old / "adapter_config.json").read_text())
        (old / "adapter_config.json").write_text(json.dumps(config | change))
    source = settled(base, old)
    if source.document.problems:
        assert text in " ".join(problem.text for problem in source.document.problems)
        return
    made = adapted_recipe(base)
    made.adapter = source.recipe.adapter
    with pytest.raises(ConfigurationError) as caught:
        filled(made)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"modules_to_save": ("embed_token",)}, "no module of its own called embed_token; it has"),
        ({"target_parameters": ("experts.up",)}, "experts.up; its stacks of experts are experts.down_proj, experts.ga"),
    ],
    ids=["module", "parameter"],
)
def test_names_that_match_nothing(folders, fields, text):
    with pytest.raises(ConfigurationError) as caught:
        build_skeleton(adapted_recipe(folders["qwen3_moe"], target_modules=("q_proj",), **fields), 64)
    assert text in str(caught.value)


def test_an_adapter_as_the_model(folders, tmp_path):
    base, old = folders["llama"], tmp_path / "old"
    stored_by_peft(base, old, **QV)
    source = settled(base, old, "adapter={rank: 4}", f"model.path={old}")
    assert source.document.problems == []
    assert source.recipe.model.path == str(base) and source.recipe.adapter.path == str(old)
    assert f"model.path: {old} is an adapter, so it became adapter.path" in source.document.notes
