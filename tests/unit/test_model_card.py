"""Model cards: what a run's directory knows, in the hub's format; and a run's sessions."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from huggingface_hub import ModelCard

from samecurve.cli import commands, evaluate
from samecurve.config.schema import Recipe
from samecurve.export.model_card import ExportInfo, model_card, write_card
from samecurve.inference import folders
from samecurve.run.sessions import sessions, unknown_origin

RECIPE = {
    "output_dir": "runs/x",
    "steps": 4,
    "model": {"config": {"model_type": "llama"}},
    "data": {"path": "my.jsonl"},
    "batch": {"global_batch_size": 8, "sequence_length": 16},
    "optimizer": {"learning_rate": 1e-3},
}
HUB = {"path": "org/base", "config": None}


def facts(**changes) -> dict:
    recipe = Recipe.model_validate(RECIPE | changes.pop("recipe", {})).model_dump()
    found = {"recipe": recipe, "recipe_path": "recipes/x.yaml", "overrides": ["seed=1"], "output_dir": "runs/x"}
    found |= {"strategy": "zero3", "world_size": 2, "device": "NVIDIA H200", "model_type": "llama", "adapter": None}
    found |= {"num_parameters": 1200, "num_trained_parameters": 1200, "started": "2026-11-21T10:00:00+00:00"}
    found |= {"data": {"train": {"rows": 40}, "held_out": {"rows": 5}}, "data_fingerprints": {"train": "abc"}}
    return found | {"versions": {"torch": "2.13.0", "peft": None}, "start_step": 0, "resumed_from": None} | changes


def written(folder: Path, content: dict, status: dict | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(content))
    if status:
        (folder / "status.json").write_text(json.dumps(status))


def record(step: int, loss: float | None, **more) -> str:
    return (
        json.dumps({"step": step, "loss": loss, "tokens": 100, "step_seconds": 0.5, "skipped_steps": 0, **more}) + "\n"
    )


@pytest.fixture
def run(tmp_path):
    """Two sessions of four steps, the first of which was preempted."""
    own = "runs/x/checkpoints/step_00000002"
    written(tmp_path / "previous" / "1", facts(strategy="ddp"), {"state": "preempted", "reason": "SIGTERM"})
    written(tmp_path, facts(start_step=2, resumed_from=own, started="2026-11-21T11:00:00+00:00"))
    evaluated = {"eval_loss": 6.5, "eval_accuracy": 0.25}
    lines = [record(1, 8.0), record(2, None), record(3, 7.0, eval_loss=7.5), record(4, 6.0, **evaluated)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


def test_what_the_directory_knows_is_in_the_card(run):
    text = model_card(run, ExportInfo())
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "license": "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["samecurve", "pretrain"],
    }
    for line in (
        "| recipe | recipes/x.yaml seed=1 |",
        "| train | rows 40; fingerprint abc |",
        "| held out | rows 5; fingerprint not known |",
        "| optimizer steps | 4 of 4 |",
        "| trained on | 400 tokens, rows or pairs, as the loss counts them |",
        "| hardware | 2 x NVIDIA H200 |",
        "| versions | torch 2.13.0 |",
        "| 2 |  |  |",
        "| 4 | 6.0000 | 6.5000 |",
        "| accuracy | 0.2500 |",
        "| 2026-11-21T10:00:00+00:00 | 1 | ddp | 2 | NVIDIA H200 | preempted: SIGTERM |",
        "| 2026-11-21T11:00:00+00:00 | 3 | zero3 | 2 | NVIDIA H200 | this model |",
        "- the licence of these weights",
    ):
        assert f"{line}\n" in text, line
    block = text.partition("```yaml\n")[2].partition("```")[0]
    assert Recipe.model_validate(yaml.safe_load(block)).optimizer.learning_rate == 1e-3


WHOLE = {"engine": "DDP", "strategy_path": None, "precision": "fp32"}
PREDICTED = {"step_seconds": 0.5, "step_seconds_interval": [0.1, 1.0], "basis": "measured"}


def test_a_name_that_is_not_utf8_costs_no_card_and_no_report(run, tmp_path, capsys):
    name = os.fsdecode(b"q\xff")
    folder = tmp_path / name
    written(folder / "previous" / "1", facts(), {"state": "failed", "reason": f"recipes/{name}.yaml"})
    own = {"resumed_from": f"{name}/checkpoints/step_00000002", "output_dir": name, "recipe_path": f"{name}.yaml"}
    written(folder, facts(start_step=2, **WHOLE, **own), {"state": "failed", "reason": "\ud800"})
    (folder / "metrics.jsonl").write_text(record(1, 8.0) + record(3, 7.0))
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "\ud800", "text": "b"}) + "\n")
    write_card(folder, ExportInfo(), tmp_path)
    assert r"q\udcff.yaml" in (tmp_path / "README.md").read_text(encoding="utf-8")
    for command in ("report", "summary"):
        assert commands.main([command, str(folder)]) == 0, capsys.readouterr()
    assert r"q\udcff.yaml" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "losses", [(1e308, -1e308), (1e308, 5e-324), (1.7e308, 1.7e308), (10**308, -(10**308)), (-1.7e308, 1.7e308)]
)
def test_numbers_of_any_size_cost_no_card_and_no_report(losses, run, tmp_path, capsys):
    sizes = {name: losses[0] for name in ("step_seconds", "tokens", "mfu", "eval_loss", "peak_memory_gib", "grad_norm")}
    lines = [record(step, loss, **sizes) for step, loss in enumerate(losses * 2, 1)]
    (run / "metrics.jsonl").write_text("".join(lines))
    written(run, facts(**WHOLE, predicted=PREDICTED))
    write_card(run, ExportInfo(), tmp_path / "previous")
    other = shutil.copytree(run, tmp_path / "other")
    (other / "metrics.jsonl").write_text("".join(reversed(lines)) + record(5, 1.0) + "".join(lines[1:]))
    for words in (["report", run], ["summary", run], ["report", run, other]):
        assert commands.main(list(map(str, words))) == 0, capsys.readouterr()


@pytest.mark.parametrize("model_type", [["a"], {}, 3])
def test_a_strange_config_costs_no_card(model_type, run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    write_card(run, ExportInfo(), tmp_path)
    assert (tmp_path / "README.md").exists()


def test_the_card_says_what_is_unproven(run):
    written(run, facts(unproven=["packed rows of a ctrl"]))
    assert "| unproven | packed rows of a ctrl |" in model_card(run, ExportInfo())


def test_the_card_shows_the_loss(run, tmp_path):
    write_card(run, ExportInfo(step=3), tmp_path)
    assert "\n![loss at each step](loss.svg)\n" in (tmp_path / "README.md").read_text()
    picture = ElementTree.parse(tmp_path / "loss.svg").getroot()
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "loss" in texts and any(text.startswith("held out, lowest ") for text in texts)
    assert "4" not in texts  # the axis ends at step 3


def test_without_a_loss_there_is_no_picture(run, tmp_path):
    (run / "metrics.jsonl").write_text(record(1, None))
    write_card(run, ExportInfo(), tmp_path)
    assert "loss.svg" not in (tmp_path / "README.md").read_text() and not (tmp_path / "loss.svg").exists()


def test_of_a_checkpoint_nothing_later_is_told(run):
    text = model_card(run, ExportInfo(dtype="bfloat16", step=3))
    assert "| optimizer steps | 3 of 4 |" in text and "| 4 | 6.0000" not in text
    assert "after step 3" in text and "accuracy" not in text
    assert "stored as bfloat16" in text


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("apache-2.0", {"license": "apache-2.0"}),
        ("MIT", {"license": "mit"}),
        ("ours: ask first", {"license": "other", "license_name": "ours: ask first"}),
    ],
)
def test_licenses(run, given, stored):
    text = model_card(run, ExportInfo(license=given))
    found = ModelCard(text).data.to_dict()
    assert {key: value for key, value in found.items() if key.startswith("license")} == stored
    assert "licence of these weights" not in text


@pytest.mark.parametrize("merged", [False, True])
def test_a_base_model_on_the_hub(run, merged):
    adapted = {"model": HUB, "adapter": {"name": "lora"}, "task": "sft"}
    written(run, facts(recipe=adapted, adapter={"name": "lora", "base_model": "f00"}))
    text = model_card(run, ExportInfo(merged=merged))
    data = ModelCard(text).data.to_dict()
    assert data["base_model"] == "org/base"
    assert (data["library_name"], data["base_model_relation"]) == (
        ("transformers", "finetune") if merged else ("peft", "adapter")
    )
    assert ("PeftModel" in text) is not merged
    assert "| base model's fingerprint | f00 |" in text
    assert "- what org/base was trained on, and its licence" in text


SERVED = {
    (16, False, False): "vllm serve org/base --enable-lora --lora-modules adapter=.",
    (40, False, False): "vllm serve org/base --enable-lora --max-lora-rank 64 --lora-modules adapter=.",
    (16, True, False): "# vLLM has no DoRA: merge the adapter first",
    (8, False, False): "# vLLM has no modules_to_save: merge the adapter first",
    (16, False, True): "vllm serve .  # this folder",
}


@pytest.mark.parametrize("rank, dora, merged", SERVED)
def test_how_to_serve(run, rank, dora, merged):
    adapter = {"name": "lora", "rank": rank, "dora": dora, "path": "saves/sft"}
    adapter |= {"modules_to_save": ["embed_tokens"] if rank == 8 else None}
    written(run, facts(recipe={"model": HUB, "adapter": adapter, "task": "sft"}))
    text = model_card(run, ExportInfo(merged=merged, rounding="rounding to bf16 changes x"))
    assert "| starts from | org/base with the adapter saves/sft |" in text
    assert f"```\n{SERVED[rank, dora, merged]}" in text and "| stored weights | rounding to bf16 changes x |" in text
    written(run, facts(recipe={"task": "classify"}))
    assert "vllm" not in model_card(run, ExportInfo())


def test_an_adapted_classifier_takes_its_config_from_its_folder(run):
    adapted = {"model": HUB, "adapter": {"name": "lora"}, "task": "classify"}
    written(run, facts(recipe=adapted, adapter={"name": "lora", "base_model": "f00"}))
    code = re.search(r"^```python\n(.*?)^```", model_card(run, ExportInfo()), re.MULTILINE | re.DOTALL)[1]
    (call,) = (line for line in code.splitlines() if "org/base" in line)
    assert "from_pretrained('org/base', config=AutoConfig.from_pretrained(folder, subfolder='model_config'))" in call
    assert {"AutoModelForSequenceClassification", "AutoConfig", "PeftModel"} <= {
        alias.name for node in ast.parse(code).body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_no_folder_of_this_machine_is_in_the_card(run, tmp_path, monkeypatch):
    home = tmp_path / "home" / "somebody"
    (home / "base").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    own = {
        "model": {"path": str(home / "base"), "config": None},
        "output_dir": str(home / "work" / "runs" / "x"),
        "adapter": {"name": "lora"},
        "data": {"path": "~/my.jsonl", "mixture": None},
        "task": "sft",
    }
    (home / "work").mkdir()
    monkeypatch.chdir(home / "work")
    adapter = {"name": "lora", "base_model": "f00"}
    overrides = [f"model.path={home / 'base'}", "seed=1"]
    found = facts(recipe=own, adapter=adapter, overrides=overrides, recipe_path=str(home / "work" / "x.yaml"))
    written(run, {**found, "resumed_from": str(home / "runs/other/checkpoints/step_00000002")})
    text = model_card(run, ExportInfo())
    assert str(tmp_path) not in text and "~" not in text
    assert "from_pretrained('base')" in text and "output_dir: runs/x" in text
    assert "| recipe | x.yaml model.path=base seed=1 |" in text


def test_no_html_of_a_run_is_in_the_card(run):
    bad = "<img src=x onerror=alert(1)>"
    inside = {"data": {"path": f"{bad}\n```\n{bad}"}, "model": {"path": bad, "config": None}, "evaluate": {"path": bad}}
    written(run, facts(recipe=inside, recipe_path=bad, overrides=[bad], output_dir=f"runs/{bad}", device=bad))
    text = model_card(run, ExportInfo())
    _, front, body = text.split("---\n", 2)
    fence = re.search(r"^(`{4,})yaml$", body, re.MULTILINE)[1]  # longer than any in the text
    code = re.compile(rf"^{fence}yaml\n.*?^{fence}$|^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
    assert len(code.findall(body)) == 2
    assert "<" not in code.sub("", body) and "&lt;img" in body


def test_no_block_of_code_is_closed_by_a_name(run):
    name = "a\n```\n<img src=x onerror=alert(1)>\n"
    written(run, facts(recipe={"model": {"path": name, "config": None}, "adapter": {"name": "lora"}, "task": "sft"}))
    body = model_card(run, ExportInfo()).split("---\n", 2)[2]
    blocks = re.compile(r"^(`{3,})\w*\n.*?^\1$", re.MULTILINE | re.DOTALL)
    assert len(blocks.findall(body)) == 3 and "<img" not in blocks.sub("", body)


@pytest.mark.parametrize(
    "text, shown",
    [
        (
            "data.mixture=[{path: /home/me/a, weight: 1},{path:/home/me/b}]",
            "data.mixture=[{path: a, weight: 1},{path:b}]",
        ),
        ("'/home/me/x.jsonl:3': bad", "'x.jsonl:3': bad"),
        ("no ~/x/y there", "no y there"),
        ("../../home/me/x", "x"),
        ("runs/../../../home/me/x", "x"),
        ("file:///home/me/x.jsonl", "x.jsonl"),
        *((text, text) for text in ("https://host/a/b", "s3://bucket/a/b", "OWNER/NAME", "[/INST] </think>", "a/b/c")),
    ],
)
def test_paths_within_texts_are_shortened(run, text, shown):
    written(run / "previous" / "1", facts(), {"state": "failed", "exit_code": 3, "reason": text})
    own = "runs/x/checkpoints/step_00000002"
    written(run, facts(overrides=[text], start_step=2, resumed_from=own))
    card = model_card(run, ExportInfo())
    assert f"recipes/x.yaml {shown}" in html.unescape(card) and "/me/" not in card and "~" not in card
    assert html.unescape(card).count(shown) >= 2


def test_a_base_model_on_the_disk_has_no_name_on_the_hub(run, tmp_path):
    (tmp_path / "base").mkdir()
    written(run, facts(recipe={"model": {"path": str(tmp_path / "base"), "config": None}}))
    assert "base_model" not in ModelCard(model_card(run, ExportInfo())).data.to_dict()


def test_sessions_end_where_a_run_began_afresh(run):
    """previous/ also holds runs that another one moved aside."""
    written(run / "previous" / "2", facts(strategy="fsdp", start_step=0), {"state": "running"})
    found = sessions(run)
    assert [(each.facts["strategy"], each.start_step, each.ended) for each in found] == [
        ("fsdp", 0, "killed, or its host failed"),
        ("zero3", 2, "not known"),
    ]
    written(run, facts())
    assert [each.facts["strategy"] for each in sessions(run)] == ["zero3"]


@pytest.mark.parametrize("name", ["1_old", "²"])
def test_sessions_are_found_beside_folders_of_other_names(run, name):
    written(run / "previous" / name, facts(strategy="fsdp"))
    assert [each.facts["strategy"] for each in sessions(run)] == ["ddp", "zero3"]


@pytest.mark.parametrize("content", ["", "half {", "[1]", '{"state": "done", "earlier": 7}'])
def test_how_a_session_with_a_damaged_status_ended_is_not_known(run, content):
    """The card is written when the training is through: then it is too late to stop for that."""
    (run / "previous" / "1" / "status.json").write_text(content)
    assert [each.ended for each in sessions(run)] == ["not known", "not known"]


def test_a_start_that_was_refused_is_not_taken_for_how_the_session_before_it_ended(run):
    (run / "status.json").write_text(json.dumps({"state": "failed", "earlier": {"state": "done"}}))
    assert sessions(run)[-1].ended == "done"


def test_the_own_directory_may_be_spelled_otherwise(run, monkeypatch):
    """--resume with an absolute path, of a run whose output_dir is relative."""
    monkeypatch.chdir(run.parent)
    written(run, facts(start_step=2, output_dir=run.name, resumed_from=f"{run}/checkpoints/step_00000002"))
    assert [each.facts["strategy"] for each in sessions(run)] == ["ddp", "zero3"]


def test_a_run_that_went_on_from_another_directory(run):
    written(run, facts(start_step=2, resumed_from="runs/other/checkpoints/step_00000002"))
    found = sessions(run)
    assert len(found) == 1 and unknown_origin(found[0]) == "runs/other/checkpoints/step_00000002"
    assert "resumed from runs/other/checkpoints/step_00000002, whose history is not known" in model_card(
        run, ExportInfo()
    )


def test_a_run_without_evaluation_says_so(run):
    (run / "metrics.jsonl").write_text(record(1, 8.0))
    assert "None: the run had no evaluation on held-out rows." in model_card(run, ExportInfo())


# what evaluate and export say before anything is loaded


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["evaluate", "RUN"], "DATA: the run held out no rows"),
        (["evaluate", "RUN", "nowhere.jsonl"], "DATA: no such file or folder"),
        (["evaluate", "RUN", "--batch_size", "0"], "--batch_size: found 0"),
        (["evaluate", "RUN/model"], "DATA: the run held out no rows"),
        (["evaluate", "RUN/model/nothing"], "run.json: no recipe found; give the output_dir of a run"),
        (["evaluate", "RUN", "--model", "RUN/previous"], "previous: no exported model here"),
        (["evaluate", "RUN", "data.text_column=body"], "found in the place of DATA; give DATA first"),
        (
            ["evaluate", "RUN", "my.jsonl", "data.chosen_column=a"],
            "the run's recipe: data.chosen_column: not a key of DATA for task pretrain; use one of data.text_column",
        ),
        (["evaluate", "RUN", "my.jsonl", "data.text_column={"], "data.text_column: invalid YAML"),
        (["export", "RUN/model/nothing"], "no run here (no run.json)"),
        (["export", "RUN", "--checkpoint", "latest"], "RUN: no checkpoint found; give the output_dir of a run that"),
        (["export", "RUN", "--checkpoint", "gone"], "--checkpoint: no such folder: gone"),
        (["export", "RUN", "--checkpoint", "best"], "--checkpoint: the run has no best one (checkpoint.best); give"),
    ],
)
def test_mistakes_are_told_first(run, arguments, text, capsys):
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert commands.main([word.replace("RUN", str(run)) for word in arguments]) == 2
    assert text.replace("RUN", str(run)) in capsys.readouterr().err


def test_a_recipe_of_another_version_is_named(run, capsys):
    content = facts()
    content["recipe"]["optimizer"]["inertia"] = 0.9
    written(run, content | {"versions": {"samecurve": "9.9"}})
    assert commands.main(["evaluate", str(run)]) == 2
    told = capsys.readouterr().err
    assert "the recipe does not fit this version of samecurve (optimizer.inertia); version 9.9 wrote it" in told


def test_a_run_that_has_not_ended_is_sent_to_export(run, capsys):
    (run / "checkpoints" / "step_00000002").mkdir(parents=True)
    assert commands.main(["generate", str(run)]) == 2
    assert f"export the newest one: python -m samecurve export {run}" in capsys.readouterr().err


def test_columns_of_the_data_to_measure(run):
    written(run, facts(recipe={"task": "sft", "data": {"path": "my.jsonl", "messages_column": "turns"}}))
    trained = folders.read_recipe(run)
    given = ["data.messages_column=null", "data.prompt_column=1", "data.completion_column=answer"]
    found = evaluate.with_columns(trained, "other.jsonl", given)
    columns = {"messages_column": None, "prompt_column": "1", "completion_column": "answer"}
    assert found == trained.model_copy(update={"data": trained.data.model_copy(update=columns)})
    assert evaluate.with_columns(trained, "data.jsonl", []) == trained


def test_the_number_of_rows_to_measure_is_that_of_the_command(run):
    """Not that of the rows that were trained on."""
    data, other = {"path": "my.jsonl", "max_samples": 100, "validation_fraction": 0.5}, str(run / "metrics.jsonl")
    written(run, facts(recipe={"data": data}))
    trained = folders.read_recipe(run)
    for columns, number in (([], None), (["data.max_samples=2"], 2)):
        measured = evaluate.with_evaluation_data(evaluate.with_columns(trained, other, columns), run, other)
        assert (measured.evaluation.path, measured.evaluation.max_samples) == (other, number)
    held_out = evaluate.with_evaluation_data(evaluate.with_columns(trained, None, []), run, None)
    assert (held_out.evaluation, held_out.data.max_samples) == (None, 100)


def test_a_file_takes_the_place_of_a_mixture(run):
    sources = [{"path": "a.jsonl", "weight": 0.75}, {"path": "b.jsonl", "weight": 0.25}]
    written(run, facts(recipe={"data": {"mixture": sources, "validation_fraction": 0.1}}))
    assert "| data | a.jsonl (weight 0.75), b.jsonl (weight 0.25) |" in model_card(run, ExportInfo())
    trained = folders.read_recipe(run)
    other = evaluate.with_evaluation_data(trained, run, str(run / "metrics.jsonl"))
    assert (other.data.path, other.evaluate.path, other.data.mixture) == (*[str(run / "metrics.jsonl")] * 2, None)
    assert evaluate.with_evaluation_data(trained, run, None).data == trained.data
