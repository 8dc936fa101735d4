"""A model that brings its own Python files: refused unless the recipe says so, and exported with them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from test_model_card import facts
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from samecurve.cli import commands
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError
from samecurve.export.hf_export import ExportTarget, export
from samecurve.inference import loading
from samecurve.models.skeleton import build_skeleton
from samecurve.models.weights import load_weights

CONFIGURATION = """
from pathlib import Path
from transformers import LlamaConfig

class ToyConfig(LlamaConfig):
    model_type = "toy"

Path(__file__).with_suffix(".ran").touch()
"""
MODELLING = """
from transformers import LlamaForCausalLM
from .configuration_toy import ToyConfig

class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def forward(self, *arguments, **named):
        found = super().forward(*arguments, **named)
        found.logits = found.logits + 1
        return found
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # transformers adds the folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "configuration_toy.py").write_text(CONFIGURATION)
    (folder / "modeling_toy.py").write_text(MODELLING)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    names = {"AutoConfig": "configuration_toy.ToyConfig", "AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "auto_map": names, **sizes}))
    return folder


def made(folder: Path, **model) -> Recipe:
    return Recipe.model_validate(
        {
            "output_dir": "unused",
            "steps": 1,
            "model": {"path": str(folder), **model},
            "data": {"path": "unused"},
            "batch": {"global_batch_size": 1, "sequence_length": 8},
            "optimizer": {"learning_rate": 1e-3},
        }
    )


def test_it_is_not_run_unless_the_recipe_says_so(folder):
    with pytest.raises(ConfigurationError, match="set model.trust_remote_code to true to run them"):
        build_skeleton(made(folder), 64)
    assert not list(folder.parent.rglob("*.ran"))


def test_it_is_trained_and_exported_with_its_files(folder, tmp_path):
    recipe = made(folder, trust_remote_code=True)
    model = build_skeleton(recipe, 64)
    assert type(model).__name__ == "ToyForCausalLM"
    assert list(folder.parent.rglob("*.ran"))
    weights = {name: torch.full(p.shape, 0.01) for name, p in model.named_parameters()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=_tokenizer(tmp_path))
    export(iter(weights.items()), model, ExportTarget(tmp_path / "exported", tokenizer), True)
    assert {"configuration_toy.py", "modeling_toy.py"} <= {path.name for path in (tmp_path / "exported").iterdir()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    assert type(again).__name__ == "ToyForCausalLM"
    assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())


def test_its_weights_are_read_shard_by_shard_too(folder):
    recipe = made(folder, trust_remote_code=True)
    model = build_skeleton(recipe, 64)
    real = type(model)(model.config)
    real.save_pretrained(folder)
    found = {}
    load_weights(model, recipe, found.__setitem__)
    assert all(torch.equal(found[name], p) for name, p in real.named_parameters())


@pytest.mark.parametrize("trusted", [True, False])
def test_a_model_with_code_of_its_own_is_loaded_where_its_run_trusted_it(folder, trusted, tmp_path):
    shape = build_skeleton(made(folder, trust_remote_code=True), 64)
    type(shape)(shape.config).save_pretrained(folder)
    run = tmp_path / "run"
    model = {"path": str(folder), "trust_remote_code": trusted}
    shutil.copytree(folder, run / "model")
    (run / "run.json").write_text(json.dumps(facts(recipe={"model": model})))
    PreTrainedTokenizerFast(tokenizer_file=_tokenizer(tmp_path)).save_pretrained(run / "model")
    if trusted:
        loaded, _ = loading.load_with_tokenizer(run / "model")
        assert type(loaded).__name__ == "ToyForCausalLM"
        assert commands.main(["export", str(run), "--dtype", "bf16"]) == 0
    else:
        with pytest.raises(
            ConfigurationError, match="the run directory of a recipe with model.trust_remote_code: true"
        ):
            loading.load_with_tokenizer(run / "model")


def _tokenizer(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")
