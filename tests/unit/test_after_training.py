"""The commands on what runs leave behind: models with code of their own, adapters, classifiers, merged folders."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_constants import change
from test_export import tokenizer
from test_lora_model import adapted_recipe, filled, folders, moved, write
from test_model_card import facts
from test_packaged import published
from tiny_families import round_trip_config
from transformers import AutoModelForCausalLM

from samecurve.cli import commands as cli
from samecurve.cli import summary
from samecurve.config.inheritance import latest_overrides
from samecurve.config.schema import Recipe
from samecurve.inference import generation
from samecurve.models.pretrained import constants
from samecurve.models.weight_files import fingerprint, read, weight_files

__all__ = ["folders"]


def written_run(directory, **changes) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "run.json").write_text(json.dumps(facts(**changes)))


@pytest.fixture
def adapted(folders, tmp_path):  # noqa: F811
    """A LoRA run whose base is a folder of its own."""
    base = shutil.copytree(folders["llama"], tmp_path / "base")
    written_run(tmp_path / "run", recipe={"task": "sft", "model": {"path": str(base)}, "adapter": {"name": "lora"}})
    write(moved(filled(adapted_recipe(base))), tmp_path / "run" / "model")
    return tmp_path / "run"


def test_merge_and_export_in_the_dtype_asked_for(adapted, capsys):
    assert cli.main(["merge", str(adapted)]) == 0
    assert cli.main(["merge", str(adapted), "--dtype", "bf16"]) == 0
    other = adapted / "merged-bf16-2"
    assert cli.main(["export", str(adapted / "merged"), "--dtype", "bf16", "--output", str(other)]) == 0
    assert f"{adapted / 'merged'} in bf16: {other}" in capsys.readouterr().out
    by_merge, by_export = (load_file(adapted / name / "model.safetensors") for name in ("merged-bf16", "merged-bf16-2"))
    assert by_merge.keys() == by_export.keys() and len(by_merge) > 10
    for name, tensor in by_merge.items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, by_export[name])


@pytest.mark.parametrize("family", ["ernie4_5_moe", "minimax_m2"])
def test_no_merge_rounds_a_routers_bias(family, tmp_path):
    """Its name in the files is not the model's; ernie4_5_moe has it in a parameter, minimax_m2 in a buffer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(round_trip_config(family), dtype=torch.float32)
    change(model)
    model.save_pretrained(tmp_path / "base")
    biases = {name for name in weight_files(str(tmp_path / "base")) if "correction_bias" in name}
    assert biases and not biases & constants(model)
    recipe = {"task": "sft", "model": {"path": str(tmp_path / "base")}, "adapter": {"name": "lora"}}
    run = tmp_path / "run"
    written_run(run, recipe=recipe)
    write(moved(filled(adapted_recipe(tmp_path / "base", target_modules=["q_proj"]))), run / "model")
    assert cli.main(["merge", str(run)]) == 0
    assert cli.main(["merge", str(run), "--dtype", "bf16"]) == 0
    assert cli.main(["export", str(run / "merged"), "--dtype", "bf16", "--output", str(run / "again")]) == 0
    expected = weight_files(str(tmp_path / "base"))
    for folder, dtype in (("merged", "F32"), ("merged-bf16", "BF16"), ("again", "BF16")):
        stored = weight_files(str(run / folder))
        assert stored.keys() == expected.keys()
        assert {entry.dtype for name, entry in stored.items() if name not in biases} == {dtype}
        for name in biases:
            assert torch.equal(read(stored, [name])[name], read(expected, [name])[name]), folder


def test_an_adapter_without_its_base_says_what_is_gone(adapted, capsys):
    shutil.rmtree(adapted.parent / "base")
    for command in ("merge", "generate"):
        assert cli.main([command, str(adapted)]) == 2
        told = capsys.readouterr().err
        assert f"no such folder: {adapted.parent / 'base'}; restore the base model there" in told


@pytest.mark.parametrize("name", ["", "model"])
@pytest.mark.parametrize("command", ["generate", "chat", "merge", "lm_eval"])
def test_no_adapter_is_used_on_a_changed_base_model(command, name, adapted, capsys, monkeypatch):
    """By the run's path and by its model's."""
    base = adapted.parent / "base"
    recorded = json.loads((adapted / "run.json").read_text())
    recorded["adapter"] = {"base_model": fingerprint(weight_files(str(base)))}
    (adapted / "run.json").write_text(json.dumps(recorded))
    tensors = {key: tensor + 1 for key, tensor in load_file(base / "model.safetensors").items()}
    (base / "SHA256SUMS").unlink(missing_ok=True)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    words = {"lm_eval": ["arc_easy", "--show"]}.get(command, [])
    assert cli.main([command, str(adapted / name), *words]) == 4
    assert f"{base}: the base model's weights have changed since {adapted}" in capsys.readouterr().err


def test_what_lm_eval_cannot_load_is_refused(folders, tmp_path, capsys):  # noqa: F811
    """lm_eval cuts a padded embedding to the tokenizer's size before it reads the adapter with all of its rows."""
    made = adapted_recipe(folders["llama"], modules_to_save=["lm_head"])
    write(moved(filled(made)), tmp_path / "adapter")
    assert cli.main(["lm_eval", str(tmp_path / "adapter"), "arc_easy", "--show"]) == 2
    assert f"merge first: python -m samecurve merge {tmp_path / 'adapter'}" in capsys.readouterr().err
    write(moved(filled(adapted_recipe(folders["llama"]))), tmp_path / "matrices")
    assert cli.main(["lm_eval", str(tmp_path / "matrices"), "arc_easy", "--show"]) == 0
    published("mistral3", tmp_path / "images")
    tokenizer().save_pretrained(tmp_path / "images")
    assert cli.main(["lm_eval", str(tmp_path / "images"), "arc_easy", "--show"]) == 2
    assert "AutoModelForCausalLM has no class for mistral3" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("task", ["reward", None])
def test_what_writes_nothing_is_measured(command, task, tmp_path, capsys, monkeypatch):
    """task None: a folder of which no run is known, so its config.json says it."""
    monkeypatch.setattr("sys.stdin", open(__file__))
    if task:
        written_run(tmp_path, recipe={"task": task})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    assert cli.main([command, str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"use python -m samecurve predict {tmp_path}, or evaluate {tmp_path}" in told
    assert ("task reward" if task else "BertForSequenceClassification") in told


def test_causal_models_write(tmp_path):
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "ToyModelForCausalLM"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        generation.check_generates(tmp_path, tmp_path, None)


def test_the_summary_recommends_what_works(tmp_path):
    (tmp_path / "model").mkdir()
    recipe = Recipe.model_validate({**facts()["recipe"], "task": "reward"}).model_dump()
    found = facts(overrides=["seed=1", "model.path=a", "seed=2", "model={path: b}"], strategy_path=None)
    commands = dict(summary.commands(tmp_path, {**found, "recipe": recipe}))
    assert commands["run the model"] == f"python -m samecurve predict {tmp_path} --prompt 'a question' 'an answer'"
    assert "generate text" not in commands
    assert latest_overrides(found["overrides"]) == ["seed=2", "model={path: b}"]
    assert "seed=1" not in commands["try another strategy"]
