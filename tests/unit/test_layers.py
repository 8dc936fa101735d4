"""Layers of a recipe: what base files say goes with the model, the data or the adapter that a later layer replaces."""

from __future__ import annotations

import json

import pytest

from samecurve.config.inheritance import read_value
from samecurve.config.loader import read_recipe

BASE = """\
output_dir: runs/x
steps: 10
task: sft
model: {path: of/first, revision: v1, trust_remote_code: true}
adapter: {name: lora, rank: 16, alpha: 32}
data: {path: of/data, config: main, split: train_sft, revision: v2}
batch: {sequence_length: 64}
optimizer: {learning_rate: 1e-4}
"""
SCRATCH = "model: {config: {model_type: llama}}\ntokenizer: {vocabulary_size: 300}\nadapter: {name: null}\n"
TRUST = "model.trust_remote_code: true of base.yaml:4 was for of/first, which is replaced; give it again if it holds"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text("{}")
    return tmp_path


def read(folder, text: str, *overrides: str):
    (folder / "r.yaml").write_text(text)
    return read_recipe("r.yaml", overrides)


def adapter(folder, name: str, base: str) -> None:
    (folder / name).mkdir()
    stored = {"base_model_name_or_path": base, "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / name / "adapter_config.json").write_text(json.dumps(stored))
    (folder / name / "adapter_model.safetensors").write_text("")


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("base: base.yaml\nmodel: {path: of/second}\n", ()),
        ("base: base.yaml\n", ("model.path=of/second",)),
        ("base: base.yaml\n", ("model.path=null", "model.path=of/second")),
        ("base: base.yaml\n" + SCRATCH, ()),
    ],
)
def test_trust_and_revision_are_of_one_model(folder, text, overrides):
    source = read(folder, text, *overrides)
    assert source.document.problems == []
    assert (source.recipe.model.trust_remote_code, source.recipe.model.revision) == (False, None)
    assert TRUST in source.document.notes and any("model.revision: v1" in note for note in source.document.notes)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("base: base.yaml\nmodel: {path: of/second, trust_remote_code: true}\n", ()),
        ("base: base.yaml\n", ("model.trust_remote_code=true", "model.path=of/second")),
        ("base: base.yaml\n", ("model.path=of/second", "model.trust_remote_code=true")),
        ("base: base.yaml\nmodel: {path: of/first}\n", ("model.path=of/first",)),
    ],
)
def test_trust_in_what_is_named_stays(folder, text, overrides):
    assert read(folder, text, *overrides).recipe.model.trust_remote_code is True


def test_splits_are_of_one_data_set(folder):
    source = read(folder, "base: base.yaml\n", "data.path=text.jsonl")
    assert source.document.problems == [] and source.recipe.data.split == "train"
    notes = [note for note in source.document.notes if "was for of/data" in note]
    assert [note.partition(":")[0] for note in notes] == ["data.config", "data.revision", "data.split"]


@pytest.mark.parametrize("key", ["adapter: {{path: {0}}}", "model: {{path: {0}}}"])
def test_an_adapter_replaces_what_its_base_file_says(folder, key):
    adapter(folder, "a", "second")
    source = read(folder, "base: base.yaml\n" + key.format("a"))
    assert source.document.problems == []
    model = source.recipe.model
    assert (model.path, source.recipe.adapter.rank) == ("second", 8)
    assert (model.trust_remote_code, model.revision) == (False, None)
    assert TRUST in source.document.notes


def test_an_adapter_of_a_base_file_gives_way_to_no_later_key(folder):
    adapter(folder, "a", "second")
    (folder / "base.yaml").write_text(BASE.replace("adapter: {name: lora, rank: 16, alpha: 32}", "adapter: {path: a}"))
    source = read(folder, "base: base.yaml\nmodel: {path: first}\nadapter: {rank: 4}\n")
    assert [problem.key for problem in source.document.problems] == ["adapter.rank"]
    assert source.document.get("model", "path") == "first"
    assert "model.path: first counts, and the adapter in a was trained on second" in source.document.notes


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/tmp/a #1", "/tmp/a #1"),
        ("#1", "#1"),
        ("'a' # quoted", "a"),
        ("a#1", "a#1"),
        ("1e-4 # a number", 1e-4),
        ("a", "a"),
    ],
)
def test_a_value_of_the_command_line_has_no_comment(text, value):
    assert read_value(text) == (value, [])
