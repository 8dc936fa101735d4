from __future__ import annotations

import copy
import math
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from samecurve.config.schema import Optimizer, Schedule
from samecurve.config.schema_training import num_warmup_steps
from samecurve.errors import ConfigurationError
from samecurve.models.skeleton import check_groups, freeze
from samecurve.optim.factory import build_optimizer
from samecurve.optim.parameter_groups import Roles, describe_groups, parameter_groups, roles_of
from samecurve.optim.schedule import learning_rate, set_learning_rate

PEAK = 0.01


def recipe(steps: int = 20, **schedule) -> SimpleNamespace:
    chosen = Schedule(**schedule)
    return SimpleNamespace(
        steps=steps,
        schedule=chosen,
        warmup_steps=num_warmup_steps(steps, chosen.warmup_steps, chosen.warmup_ratio),
        optimizer=Optimizer(learning_rate=PEAK, weight_decay=0.5),
    )


@pytest.mark.parametrize(
    ("schedule", "update", "expected"),
    [
        ({"name": "constant", "warmup_steps": 4}, 1, PEAK / 4),
        ({"name": "constant", "warmup_steps": 4}, 4, PEAK),
        ({"name": "constant", "warmup_steps": 4}, 20, PEAK),
        ({"name": "constant"}, 1, PEAK),
        ({"name": "linear", "warmup_steps": 4, "min_lr_ratio": 0.0}, 12, PEAK * 0.5),  # half way from 4 to 20
        ({"name": "linear", "warmup_steps": 4, "min_lr_ratio": 0.2}, 20, PEAK * 0.2),
        ({"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1}, 4, PEAK),
        ({"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1}, 12, PEAK * 0.55),  # cos(pi/2) = 0
        ({"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1}, 20, PEAK * 0.1),
        ({"name": "wsd", "warmup_steps": 4, "decay_steps": 8, "min_lr_ratio": 0.0}, 12, PEAK),
        ({"name": "wsd", "warmup_steps": 4, "decay_steps": 8, "min_lr_ratio": 0.0}, 18, PEAK * 0.25),  # 6 of 8 decayed
    ],
)
def test_rates_worked_out_by_hand(schedule, update, expected):
    assert learning_rate(recipe(**schedule), update) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("steps", "ratio", "warmup"),
    [(560, 0.053, 30), (20, 0.25, 5), (100, 0.07, 8), (20, 0.01, 1), (20, 0.0, 0), (3, 0.9, 2), (1, 0.5, 0)],
)
def test_warmup_as_a_share_of_the_steps(steps, ratio, warmup):
    """0.07 * 100 is 7.000000000000001; at least the last step comes after the warm-up."""
    found = recipe(steps, warmup_ratio=ratio).warmup_steps
    theirs = math.ceil(steps * ratio) if ratio == 0 else TrainingArguments(warmup_steps=ratio).get_warmup_steps(steps)
    assert found == warmup == min(theirs, steps - 1)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_rates_of_transformers(name, delay):
    """Its n-th update has the rule's value at n - 1, which delay_steps gives here, too."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    reference = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, 5),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, 5, 20),
        "cosine": lambda: get_cosine_with_min_lr_schedule_with_warmup(optimizer, 5, 20, min_lr_rate=0.1),
        "wsd": lambda: get_wsd_schedule(optimizer, 5, 8, num_training_steps=20, decay_type="linear"),
    }[name]()
    rule = reference.lr_lambdas[0]
    decay, least = 8 if name == "wsd" else None, 0.1 if name == "cosine" else 0
    made = recipe(name=name, warmup_steps=5, decay_steps=decay, min_lr_ratio=least, delay_steps=delay)
    for update in range(1, 21):
        assert learning_rate(made, update) == pytest.approx(PEAK * rule(update - delay), rel=1e-9, abs=1e-12), update


def test_decay_applies_to_matrices_only_and_by_hand():
    """AdamW without a gradient shrinks a decayed weight by the factor 1 - rate * decay, and no other."""
    layer = torch.nn.Linear(2, 1)
    for weight in layer.parameters():
        weight.data.fill_(2.0)
        weight.grad = torch.zeros_like(weight)
    roles = Roles(frozenset({"weight"}), frozenset())
    optimizer = build_optimizer(
        parameter_groups(layer.named_parameters(), recipe().optimizer, roles), recipe().optimizer
    )
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    assert layer.weight.tolist() == [[pytest.approx(2.0 * (1 - 0.1 * 0.5))] * 2]
    assert layer.bias.tolist() == [2.0]


def meta_model(family: str, kind: type = AutoModelForCausalLM, **fields) -> PreTrainedModel:
    known = AutoConfig.for_model(family)
    sizes = {"vocab_size": 60000, "num_hidden_layers": 4} | fields
    config = AutoConfig.for_model(family, **{name: value for name, value in sizes.items() if hasattr(known, name)})
    with torch.device("meta"):
        return kind.from_config(config)


@pytest.mark.parametrize(
    "family",
    """
    bamba bert cohere falcon_h1 falcon_mamba gpt2 gpt_oss granitemoehybrid jamba llama mamba mamba2 mixtral nemotron_h
    qwen3_5_text qwen3_next
    """.split(),
)
def test_decay_applies_where_transformers_applies_it(family):
    """But never to a vector, nor to the parameters that Mamba's code marks with _no_weight_decay."""
    model = meta_model(family, AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM, use_qk_norm=True)
    weights = dict(model.named_parameters())
    expected = {
        name
        for name in Trainer.get_decay_parameter_names(None, model)
        if name in weights and weights[name].dim() > 1 and name.rpartition(".")[2] not in ("A_log", "D", "dt_bias")
    }
    assert roles_of(model).decayed & weights.keys() == expected and expected


@pytest.mark.parametrize(
    ("family", "name", "decayed", "taken"),
    [
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_bias", False, False),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", True, True),
        ("jetmoe", "model.layers.0.mlp.input_linear.weight", True, True),
        ("cohere", "model.layers.0.self_attn.q_norm.weight", False, False),  # (heads, head_dim)
        ("mamba", "backbone.layers.0.mixer.A_log", False, False),  # (channels, states)
        ("mamba", "backbone.layers.0.mixer.conv1d.weight", True, False),
        ("mamba", "backbone.layers.0.mixer.in_proj.weight", True, True),
        ("llama", "model.embed_tokens.weight", True, False),
        ("llama", "lm_head.weight", True, False),
        ("roberta-prelayernorm", "roberta_prelayernorm.encoder.layer.0.attention.self.query.weight", True, True),
        ("roberta-prelayernorm", "roberta_prelayernorm.encoder.layer.0.attention.LayerNorm.weight", False, False),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate.weight", True, False),  # (1, features)
        ("qwen2_moe", "model.layers.0.mlp.gate.weight", True, True),  # the router, as in Moonlight
        ("rwkv", "rwkv.blocks.0.attention.time_mix_key", False, False),  # (1, 1, features)
    ],
)
def test_roles_of_weights(family, name, decayed, taken):
    model = meta_model(family, use_qk_norm=True)
    roles = roles_of(model)
    assert name in dict(model.named_parameters())
    assert (name in roles.decayed, name in roles.matrices) == (decayed, taken)


def test_a_classifiers_head_is_not_orthogonalized():
    roles = roles_of(meta_model("distilbert", AutoModelForSequenceClassification, n_layers=1))
    assert {"pre_classifier.weight", "classifier.weight"} & roles.matrices == {"pre_classifier.weight"}


def test_the_header_says_what_muon_takes():
    model = meta_model("gpt_oss", num_hidden_layers=1)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    muon = Optimizer(name="muon", learning_rate=PEAK)
    # queries, keys, values, output, router and two stacks; biases of these 7, 3 norms, sinks, embedding and head
    text = roles_of(model).describe(muon, shapes)
    assert text.startswith("muon for 7 hidden weights (") and "2 of them stacks" in text and "13 others" in text
    assert not roles_of(model).describe(Optimizer(learning_rate=PEAK), shapes)


@pytest.mark.parametrize("warmup_type", ["linear", "log"])
@pytest.mark.parametrize(
    ("name", "scheduler", "options"),
    [("constant", "WarmupLR", {}), ("linear", "WarmupDecayLR", {"total_num_steps": 20})],
)
def test_rates_are_those_of_deepspeeds_schedulers(name, scheduler, options, warmup_type):
    """The n-th update has the rate that DeepSpeed's scheduler has after n steps."""
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    warmup = {"warmup_num_steps": 6, "warmup_max_lr": PEAK, "warmup_type": warmup_type}
    theirs = getattr(lr_schedules, scheduler)(optimizer, **warmup, **options)
    ours = recipe(name=name, warmup_steps=6, warmup_type=warmup_type, min_lr_ratio=0.0)
    for update in range(1, 21):
        theirs.step(update)
        assert learning_rate(ours, update) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)


def test_one_step_of_log_warm_up_behind_a_delay():
    ours = recipe(name="constant", warmup_steps=1, warmup_type="log", delay_steps=1)
    assert [learning_rate(ours, update) for update in (1, 2, 3)] == [0.0, PEAK, PEAK]


GROUPS = (
    {"pattern": "*.embed*", "learning_rate": 1e-3, "weight_decay": 0.0},
    {"pattern": "layers.[01].mlp.*", "learning_rate": 4e-2},
    {"pattern": "layers.[0-9].*", "frozen": True},
)


def grouped_model(groups: tuple[dict, ...], tied: bool = False) -> tuple[PreTrainedModel, Optimizer]:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = meta_model("llama", vocab_size=32, num_hidden_layers=12, tie_word_embeddings=tied, **sizes)
    settings = Optimizer(learning_rate=PEAK, weight_decay=0.5, groups=groups)
    check_groups(model, settings)
    return freeze(model, settings), settings


def test_groups_by_name_and_number():
    """Layers 10 and 11 have two digits; of layers 0 and 1 the first group that matches counts; norms never decay."""
    model, settings = grouped_model(GROUPS)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    kept = {name for name, _ in model.named_parameters() if re.search(r"layers\.\d\.", name)}
    assert frozen == {name for name in kept if not re.search(r"layers\.[01]\.mlp", name)} and len(frozen) == 10 * 9 - 6
    groups = parameter_groups(model.named_parameters(), settings, roles_of(model))
    found = [(len(g["params"]), g["weight_decay"], round(g.get("rate_factor", 1) * PEAK, 9)) for g in groups]
    assert found == [(2 * 7 + 1, 0.5, PEAK), (1, 0.0, 1e-3), (6, 0.5, 4e-2), (2 * 2 + 1, 0.0, PEAK)]
    assert describe_groups(model, settings)[:3] == [
        "*.embed*: learning rate 0.001, weight decay 0 (1 weights, 512 parameters)",
        "layers.[01].mlp.*: learning rate 0.04, weight decay 0.5 (6 weights, 2,304 parameters)",
        f"layers.[0-9].*: frozen (84 weights, {10 * (4 * 256 + 32) + 8 * 3 * 384:,} parameters)",
    ]


@pytest.mark.parametrize(
    ("groups", "tied", "text"),
    [
        ([{"pattern": "lm_hed.weight", "frozen": True}], False, "the nearest names are lm_head.weight, "),
        ([{"pattern": "layer.0.*", "frozen": True}], False, "model.layers.*.self_attn.q_proj.weight"),
        ([{"pattern": "lm_head.*", "frozen": True}], True, "tied to model.embed_tokens.weight"),
        ([{"pattern": "*", "frozen": True}], False, "they freeze every parameter"),
        ([{"pattern": "*", "learning_rate": 1e-3}, {"pattern": "lm_head.*", "frozen": True}], False, "the earlier '*'"),
    ],
)
def test_groups_that_cannot_be_meant(groups, tied, text):
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        grouped_model(groups, tied)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_rates_of_groups_are_torchs_in_every_schedule(name):
    """torch's LambdaLR multiplies each group's initial rate by one factor."""
    weights = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    made = recipe(name=name, warmup_steps=5, decay_steps=8 if name == "wsd" else None)
    made.optimizer = Optimizer(learning_rate=PEAK, groups=[{"pattern": "second", "learning_rate": 3e-4}])
    groups = parameter_groups(
        zip(("first", "second"), weights, strict=True), made.optimizer, Roles(frozenset(), frozenset())
    )
    ours = build_optimizer(groups, made.optimizer)
    theirs = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 3e-4}], lr=PEAK)
    rule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda update: learning_rate(made, update) / PEAK)
    for update in range(1, 21):
        rule.step()
        set_learning_rate(ours, learning_rate(made, update))
        rates = {id(g["params"][0]): g["lr"] for g in ours.param_groups}
        assert [rates[id(weight)] for weight in weights] == pytest.approx(rule.get_last_lr(), rel=1e-12), update


def test_updates_of_groups_are_those_of_torch():
    """Five AdamW updates of a small model beside torch's own groups and schedule; what is frozen does not move."""
    config = AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(config)
    theirs = copy.deepcopy(ours)
    made = recipe(name="cosine", warmup_steps=2, steps=5)
    made.optimizer = Optimizer(learning_rate=PEAK, weight_decay=0.5, epsilon=1e-8, groups=GROUPS)
    check_groups(ours, made.optimizer)
    freeze(ours, made.optimizer)
    optimizer = build_optimizer(
        parameter_groups(ours.named_parameters(), made.optimizer, roles_of(ours)), made.optimizer
    )
    named = dict(theirs.named_parameters())
    parts = {"lr": PEAK, "weight_decay": 0.5}, {"lr": 1e-3, "weight_decay": 0.0}, {"lr": 4e-2, "weight_decay": 0.5}
    names = ["lm_head.weight"], ["model.embed_tokens.weight"], [name for name in named if ".mlp." in name]
    groups = [{"params": [named[name] for name in some]} | part for some, part in zip(names, parts, strict=True)]
    groups.append({"params": [named["model.norm.weight"]], "lr": PEAK, "weight_decay": 0.0})
    reference = torch.optim.AdamW(groups, betas=made.optimizer.betas, eps=1e-8)
    rule = torch.optim.lr_scheduler.LambdaLR(reference, lambda update: learning_rate(made, update) / PEAK)
    before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    for update in range(1, 6):
        rule.step()
        set_learning_rate(optimizer, learning_rate(made, update))
        ids = torch.arange(update, update + 12)[None]
        for model, steps in ((ours, optimizer), (theirs, reference)):
            model(input_ids=ids, labels=ids).loss.backward()
            steps.step()
            model.zero_grad()
    trained = sum(names, ["model.norm.weight"])
    for name, parameter in ours.named_parameters():
        assert parameter.requires_grad == (name in trained) and (parameter in optimizer.state) == (name in trained)
        assert torch.equal(parameter, before[name]) == (name not in trained), name
        torch.testing.assert_close(parameter, named[name], rtol=1e-5, atol=1e-6)
