"""Adapters of what is no causal language model: their head is new, or there is none."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from quantized_folders import quantize
from safetensors.torch import load_file, save_file
from test_export import tokenizer
from test_lora_model import adapted_recipe, moved
from test_weights import FAMILIES
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from samecurve.cli import commands
from samecurve.errors import ConfigurationError
from samecurve.export.hf_export import ExportTarget, export
from samecurve.inference import loading
from samecurve.models.lora import is_adapter_weight, trained_shapes
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.models.weights import load_weights
from samecurve.specs.heads import Head

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER = {**SIZES, "max_position_embeddings": 80}
BERT, ROBERTA = {"model_type": "bert", **ENCODER}, {"model_type": "roberta", **ENCODER}
NAMES = {"id2label": {0: "cold", 1: "mild", 2: "warm"}, "label2id": {"cold": 0, "mild": 1, "warm": 2}}
IDS = torch.arange(4, 36).view(2, 16)


@dataclass(frozen=True)
class Case:
    """A head on a base model that was pretrained with another one. whole: parameters that are trained beside LoRA's."""

    fields: dict
    pretrained: type
    head: Head
    load: type
    whole: set[str]
    options: dict
    quantized: bool = False


def classifier(fields, pretrained, whole, **head) -> Case:
    found = Head("sequence_classification", {"pad_token_id": 1, **head})
    options = {"num_labels": head.get("num_labels", 3), "pad_token_id": 1}
    return Case(fields, pretrained, found, AutoModelForSequenceClassification, whole, options)


def both(*names: str) -> set[str]:
    return {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


CASES = {
    "bert classifier": classifier(BERT, AutoModelForMaskedLM, both("classifier", "bert.pooler.dense"), **NAMES),
    "roberta classifier": classifier(
        ROBERTA, AutoModelForMaskedLM, both("classifier.dense", "classifier.out_proj"), **NAMES
    ),
    "llama reward": classifier(FAMILIES["llama"], AutoModelForCausalLM, {"score.weight"}, num_labels=1),
    "fp8 reward": replace(
        classifier(FAMILIES["llama"], AutoModelForCausalLM, {"score.weight"}, num_labels=1), quantized=True
    ),
    "gpt2 classifier": classifier(FAMILIES["gpt2"], AutoModelForCausalLM, {"score.weight"}, **NAMES),
    "bert embedding": Case(BERT, AutoModelForMaskedLM, Head("embedding"), AutoModel, set(), {}),
    "llama embedding": Case(FAMILIES["llama"], AutoModelForCausalLM, Head("embedding"), AutoModel, set(), {}),
    "bert masked": Case(BERT, AutoModelForMaskedLM, Head("masked_lm"), AutoModelForMaskedLM, set(), {}),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture
def base(case, tmp_path) -> Path:
    """As transformers writes it, with the head that it was pretrained with."""
    torch.manual_seed(1)
    fields = {key: value for key, value in case.fields.items() if key != "model_type"}
    config = AutoConfig.for_model(case.fields["model_type"], vocab_size=64, **fields)
    case.pretrained.from_config(config).save_pretrained(tmp_path / "base")
    return quantize(tmp_path / "base", "fp8") if case.quantized else tmp_path / "base"


def filled(case: Case, base: Path, **fields):
    made = adapted_recipe(base, **fields)
    shape = build_skeleton(made, 64, head=case.head)
    model = construct(type(shape), shape.config, torch.device("cpu"), made.adapter)
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        load_weights(shape, made, lambda name, tensor: tensors[name].copy_(tensor))
    return model


def said(model) -> torch.Tensor:
    with torch.no_grad():
        output = model(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    return output.logits if "logits" in output else output.last_hidden_state


def test_a_head_is_trained_whole_and_the_base_is_frozen(case, base):
    model = filled(case, base)
    shapes = trained_shapes(model)
    assert {name for name in shapes if not is_adapter_weight(name)} == case.whole
    assert shapes.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    layers = {name.split(".lora_")[0] for name in shapes if is_adapter_weight(name)}
    assert len(layers) >= 2 * 4
    assert not [name for name in layers if any(part in name for part in ("pooler", "classifier", "score"))]
    heads = [p for name, p in model.named_parameters() if name in case.whole and name.endswith("weight")]
    assert all(0.01 < p.std() < 0.04 for p in heads)  # as transformers draws them: 0.02


@pytest.mark.parametrize("case", [CASES["llama reward"]], ids=["llama-reward"])
def test_the_same_layers_are_adapted_as_by_peft(base, case):
    """But for a pooler and for layers of a head, which peft's own list of names does not know."""
    ours = trained_shapes(filled(case, base))
    model = case.load.from_pretrained(base, **case.options)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=TaskType.SEQ_CLS)
    theirs = {name: p for name, p in get_peft_model(model, config).named_parameters() if p.requires_grad}
    named = {name.removeprefix("base_model.model.").replace("modules_to_save.default.", "") for name in theirs}
    assert ours.keys() == named


def test_peft_reads_the_export_and_merge_proves_itself(case, base, tmp_path, capsys):
    model = moved(filled(case, base, dora=case is CASES["gpt2 classifier"]))
    expected, folder = said(model), tmp_path / "run" / "model"
    parameters = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
    export(
        parameters,
        model,
        ExportTarget(folder, tokenizer(), save_task_files=lambda where, _: (where / "beside").mkdir()),
        True,
    )
    assert not (folder / "config.json").exists()  # transformers would take it for a whole model
    loaded = PeftModel.from_pretrained(case.load.from_pretrained(base, **case.options), folder).eval()
    torch.testing.assert_close(said(loaded), expected, rtol=1e-5, atol=1e-6)
    again, _ = loading.load_with_tokenizer(folder, loading.stored_head(folder))
    torch.testing.assert_close(said(again), expected, rtol=1e-5, atol=1e-6)
    assert again.config.id2label == model.config.id2label

    assert commands.main(["merge", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "states differ" in told if case.head.kind == "embedding" else "logits differ" in told
    merged = tmp_path / "run" / "merged"
    torch.testing.assert_close(said(case.load.from_pretrained(merged).eval()), expected, rtol=1e-4, atol=1e-5)
    assert {"beside", "config.json", "tokenizer.json"} <= {path.name for path in merged.iterdir()}
    assert not any(path.name.startswith(("adapter", "model_config")) for path in merged.iterdir())


@pytest.mark.parametrize("case", [CASES["bert classifier"], CASES["llama embedding"]], ids=["bert", "llama"])
def test_other_commands_do_not_take_it_for_a_language_model(case, base, tmp_path, capsys):
    model = filled(case, base)
    parameters = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
    export(parameters, model, ExportTarget(tmp_path / "model", tokenizer()), True)
    for command in (["generate"], ["lm_eval", "arc_easy"]):
        assert commands.main([command[0], str(tmp_path), *command[1:]]) == 2
        assert "which is no causal language model" in capsys.readouterr().err


@pytest.mark.parametrize("case", [CASES["bert classifier"]], ids=["bert"])
def test_a_head_is_not_drawn_where_the_adapter_lacks_it(case, base, tmp_path):
    """An adapter whose file lost it: its model would be one with a random head."""
    model = filled(case, base)
    parameters = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
    export(parameters, model, ExportTarget(tmp_path / "model", tokenizer()), True)
    file = tmp_path / "model" / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if "classifier" not in name}, file, {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"which is no sequence classifier \(no classifier"):
        loading.load_with_tokenizer(tmp_path / "model", loading.stored_head(tmp_path / "model"))
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["classifier", "bert.pooler"]


@pytest.mark.parametrize("case", [CASES["llama reward"]], ids=["llama"])
def test_a_head_cannot_be_a_target(case, base):
    with pytest.raises(ConfigurationError, match=r"no layer of this llama is called score; it has down_proj, gate"):
        build_skeleton(adapted_recipe(base, target_modules=("q_proj", "score")), 64, head=case.head)
