"""Old names of recipe keys, values and options: refused with the new one, and still read from what a run has saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from report_cases import message, write

from samecurve.checkpoint.compatibility import changes, refusals
from samecurve.checkpoint.resume import STATE, read_state
from samecurve.config.loader import ANY_ITEM, schema_paths
from samecurve.config.renamed_keys import RENAMED_KEYS, RENAMED_VALUES, in_new_names
from samecurve.config.schema import Recipe
from samecurve.inference import folders

# Every old name, in blocks that are there and in blocks that have gone
OLD = {
    "output_dir": "runs/x",
    "steps": 100,
    "model": {"config": {"model_type": "llama", "num_hidden_layers": 4}},
    "tokenizer": {"vocabulary_size": 512},
    "data": {"path": "text.txt", "held_out_fraction": 0.25},
    "batch": {"global_batch_size": 8, "sequence_length": 64},
    "optimizer": {"name": "adamw_bf16", "learning_rate": 1e-3, "bf16_update": "kahan"},
    "schedule": {"final_ratio": 0.2},
    "memory": {"activation_checkpointing": "every_k", "every_k": 3, "gradient_sync": "once"},
    "guard": {"max_skipped_steps": 5, "rollback_ratio": 3.0, "compare_replicas_every_steps": 7},
    "timeout": {"step_seconds": 60},
}
MORE = {"memory": {"activation_checkpointing": "selective", "selective_keeps": "attention"}}
REPORTS = {
    **{old: f"{old}: renamed to {new}" for old, new in RENAMED_KEYS.items() if "." in old},
    **{
        f"{key}: {old}": f'{key}: found "{old}" (text), renamed to {new}'
        for key, values in RENAMED_VALUES.items()
        for old, new in values.items()
    },
}


def as_lines(recipe: dict) -> list[str]:
    return yaml.safe_dump(recipe, sort_keys=False).splitlines()


def keys_of(recipe: dict) -> list[tuple[str, object]]:
    """(dotted key, value) of everything in blocks."""
    blocks = [(name, block) for name, block in recipe.items() if isinstance(block, dict)]
    return [(f"{name}.{key}", value) for name, block in blocks for key, value in block.items()]


def renamed_in(recipe: dict) -> list[str]:
    given = [key for key, _ in keys_of(recipe)] + [f"{key}: {value}" for key, value in keys_of(recipe)]
    return [name for name in REPORTS if name in given]


def test_the_table_leads_to_keys_that_are_there():
    known = {".".join(path) for path in schema_paths(Recipe) if ANY_ITEM not in path}
    assert set(RENAMED_KEYS.values()) <= known and not set(RENAMED_KEYS) & known
    assert set(RENAMED_VALUES) <= known
    assert set(renamed_in(OLD)) | set(renamed_in(MORE)) == set(REPORTS) and len(REPORTS) == 11


@pytest.mark.parametrize("changes", [{}, MORE], ids=["most", "selective"])
def test_every_old_name_in_a_file_is_refused_with_its_line_and_the_new_one(changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = as_lines(OLD | changes)
    write(tmp_path, {"r.yaml": "\n".join(lines)})
    report, code = message(tmp_path, ["r.yaml"], {})
    wanted = set()
    for name in renamed_in(OLD | changes):
        block, _, key = name.partition(".")
        first = lines.index(f"{block}:")
        number = next(i for i in range(first, len(lines)) if lines[i].startswith(f"  {key}")) + 1
        wanted.add(f"  r.yaml:{number}: {REPORTS[name]}")
    assert (set(report.splitlines()[1:]), code) == (wanted, 2)  # and no other problem


@pytest.mark.parametrize("changes", [{}, MORE], ids=["most", "selective"])
def test_every_old_name_on_the_command_line_is_refused_with_the_new_one(changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    names = renamed_in(OLD | changes)
    given = [(key, value) for key, value in keys_of(OLD | changes) if key in names or f"{key}: {value}" in names]
    arguments = [f"{key}={json.dumps(value)}" for key, value in given]
    report, code = message(tmp_path, ["r.yaml", "optimizer.name=adamw_bf16", *arguments, *selective(changes)], {})
    assert (set(report.splitlines()[1:]), code) == ({f"  command line: {REPORTS[name]}" for name in names}, 2)


def selective(changes: dict) -> list[str]:
    return ["memory.activation_checkpointing=selective"] if changes else []


@pytest.mark.parametrize(("block", "new"), [("guard", "numerics"), ("timeout", "watchdog")])
def test_an_old_block_is_refused_whatever_it_holds(block, new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {})
    report, _ = message(tmp_path, ["r.yaml", f"{block}.unknown=1"], {})
    assert f"  command line: {block}: renamed to {new}" in report.splitlines()
    report, _ = message(tmp_path, ["r.yaml", f"{block}=1"], {})
    assert f"  command line: {block}: renamed to {new}" in report.splitlines()


def saved(recipe: dict) -> dict:
    about = {"model": {}, "data": {}, "strategy": "ddp", "world_size": 2, "versions": {}, "step": 40}
    return about | {"recipe": recipe}


def test_a_checkpoint_in_the_old_spelling_is_resumed(tmp_path):
    """A run of this version resumes it, and nothing is said to have changed."""
    new = in_new_names({"recipe": OLD})["recipe"]
    now = Recipe.model_validate(new).model_dump(mode="json")
    assert now["watchdog"] == {"timeout_seconds": 60} and now["numerics"]["rollback_ratio"] == 3.0
    assert (now["memory"]["every_n_layers"], now["memory"]["gradient_sync"]) == (3, "last_micro_batch")
    (tmp_path / STATE).write_text(json.dumps(saved(old_spelling(now))))
    before = read_state(tmp_path)
    assert refusals(before, saved(now)) == changes(before, saved(now)) == []
    other = {**now, "optimizer": {**now["optimizer"], "bf16_rounding": "stochastic"}}
    assert refusals(before, saved(other)) == ["optimizer.bf16_rounding: kahan -> stochastic"]


def old_spelling(recipe: dict) -> dict:
    """A whole recipe of this version as the version before it wrote it."""
    text = json.dumps(recipe)
    for old, new in [*RENAMED_KEYS.items(), *[pair for values in RENAMED_VALUES.values() for pair in values.items()]]:
        text = text.replace(f'"{new.rpartition(".")[2]}"', f'"{old.rpartition(".")[2]}"')
    found = json.loads(text)
    assert found["timeout"] == {"step_seconds": 60} and found["memory"]["activation_checkpointing"] == "every_k"
    return found


def test_a_run_json_in_the_old_spelling_is_read():
    blocks = ["timeout={step_seconds: 60}", "memory={every_k: 3, gradient_sync: once}"]
    facts = {"recipe": OLD, "overrides": ["guard.rollback_ratio=3", "memory.gradient_sync=once", "seed=1", *blocks]}
    facts["step"] = 1
    found = in_new_names(facts)
    assert found["overrides"] == [
        *("numerics.rollback_ratio=3", "memory.gradient_sync=last_micro_batch", "seed=1"),
        'watchdog={"timeout_seconds": 60}',
        'memory={"gradient_sync": "last_micro_batch", "every_n_layers": 3}',
    ]
    assert Recipe.model_validate(found["recipe"]).data.validation_fraction == 0.25
    assert "guard" in OLD and in_new_names({"step": 1}) == {"step": 1} and in_new_names({}) == {}
    assert in_new_names(found) == found


def test_commands_read_the_recipe_of_a_run_in_the_old_spelling(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"recipe": OLD}))
    assert folders.read_recipe(tmp_path).data.validation_fraction == 0.25


def test_the_recipes_have_no_old_name():
    files = sorted(Path(__file__).resolve().parents[2].glob("recipes/*.yaml"))
    contents = [yaml.safe_load(file.read_text()) for file in files]
    assert len(contents) > 5 and all(in_new_names({"recipe": each}) == {"recipe": each} for each in contents)
