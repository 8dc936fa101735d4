"""What one does with a trained model: the commands on real runs of each kind, against what training itself measured."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from harness import LLAMA, Run, long
from safetensors.torch import load_file
from test_encoder_tasks import BERT
from test_equal_curves import Case, run_case
from test_lora import run_lora
from transformers import AutoModelForCausalLM

from samecurve.cli import commands
from samecurve.data import sources
from samecurve.run.run_directory import WATCHED

TASKS = ["pretrain", "adapter", "sft", "classify"]
STEPS = 6


@pytest.fixture(scope="module")
def rows(workspace) -> dict[str, str]:
    """A file per task: 200 rows of very different lengths."""
    draw = random.Random(4)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]

    def said() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 20)))

    found = {
        "sft": [{"prompt": said(), "completion": said()} for _ in range(200)],
        "classify": [{"text": said(), "label": draw.choice(["cold", "warm", "hot"])} for _ in range(200)],
    }
    for task, made in found.items():
        path = workspace.folder / f"after_{task}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
        found[task] = str(path)
    return found


@pytest.fixture(scope="module")
def runs(workspace, reference, rows) -> dict[str, Run]:
    """One process each: that strategies agree is others' to test."""
    encoder = {**BERT, "max_position_embeddings": 512}
    models = {"sft": LLAMA, "classify": encoder}
    found = {"pretrain": reference, "adapter": run_lora(workspace, reference.directory / "model", "single")}
    for task, model in models.items():
        settings = [f"task={task}", f"data.path={rows[task]}", f"model.config={json.dumps(model)}", f"steps={STEPS}"]
        settings += [f"data.packing={'true' if task == 'sft' else 'false'}", "batch.sequence_length=512"]
        settings += [f"{key}.every_steps={STEPS}" for key in ("evaluate", "checkpoint")] + ["schedule.warmup_steps=2"]
        found[task] = workspace.run(None, 1, *settings)
        assert found[task].returncode == 0, found[task].output
    held_out = found["sft"].facts["data"]["held_out"]
    assert held_out["rows"] < held_out["documents"] / 2  # packed: whether they see each other changes the loss
    return found


@pytest.fixture(autouse=True)
def cache(workspace, monkeypatch):
    monkeypatch.setenv("SAMECURVE_CACHE", str(workspace.folder / "cache"))


@pytest.mark.parametrize("task", TASKS)
def test_evaluate_finds_what_the_run_wrote(task, runs, tmp_path, capsys):
    run = runs[task]
    assert commands.main(["evaluate", str(run.directory), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    wrote = {key: value for key, value in run.metrics[-1].items() if key.startswith("eval_")}
    assert found["metrics"].keys() == wrote.keys() and found["precision"] == "fp32"
    for key, value in wrote.items():
        assert found["metrics"][key] == pytest.approx(value, rel=1e-6), key
    assert f"{wrote['eval_loss']:.4f}   {wrote['eval_loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_watch_finds_what_the_run_wrote(task, runs, capsys):
    """The run's checkpoint, evaluated by another process: its numbers are read where the run has none of its own."""
    run = runs[task]
    wrote = next(record for record in reversed(run.metrics) if "eval_loss" in record)
    for _ in range(2):  # the second time nothing is left to do
        assert commands.main(["evaluate", str(run.directory), "--watch"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"step {wrote['step']}: held-out loss") == 1
    watched = [json.loads(line) for line in (run.directory / WATCHED).read_text().splitlines()]
    for key, value in watched[-1].items():
        assert value == pytest.approx(wrote[key], rel=1e-6), key
    assert not list(run.directory.glob(".watch-*"))


def test_evaluate_reads_a_file_as_the_recipe_reads_data(workspace, runs, tmp_path):
    """The held-out documents in a file of their own are the same measurement; half of them are another one."""
    lines = (workspace.folder / "documents.jsonl").read_text().splitlines()
    held_out = [line for line in lines if sources.is_held_out(json.loads(line)["text"], 0.1)]
    measured = []
    for kept in (held_out, held_out[::2]):
        (tmp_path / "data.jsonl").write_text("\n".join(kept))
        arguments = [str(runs["pretrain"].directory), str(tmp_path / "data.jsonl"), "--batch_size", "3"]
        assert commands.main(["evaluate", *arguments, "--json", str(tmp_path / "found.json")]) == 0
        measured.append(json.loads((tmp_path / "found.json").read_text())["metrics"])
    wrote = runs["pretrain"].metrics[-1]
    assert measured[0]["eval_bits_per_byte"] == pytest.approx(wrote["eval_bits_per_byte"], rel=1e-6)
    assert measured[0]["eval_tokens"] == wrote["eval_tokens"] > measured[1]["eval_tokens"]


def test_a_checkpoint_of_several_ranks_is_the_export_without_the_strategy(workspace, reference, tmp_path, capsys):
    run = run_case(workspace, Case("zero3", 2, 2))
    assert (
        commands.main(["export", str(run.directory), "--checkpoint", "latest", "--output", str(tmp_path / "fp32")]) == 0
    )
    found = load_file(tmp_path / "fp32" / "model.safetensors")
    assert found.keys() == run.weights.keys()
    assert all(torch.equal(found[name], run.weights[name]) for name in found)
    early = ["--checkpoint", str(run.checkpoint(5)), "--dtype", "bf16", "--output", str(tmp_path / "early")]
    assert commands.main(["export", str(run.directory), *early]) == 0
    before = load_file(tmp_path / "early" / "model.safetensors")
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    assert not any(torch.equal(before[name], found[name].bfloat16()) for name in found)
    assert "| optimizer steps | 5 of 25 |" in (tmp_path / "early" / "README.md").read_text()


@pytest.mark.parametrize("optimizer", ["adafactor", *long("adamw_8bit")])
def test_a_checkpoint_whose_optimizer_has_states_of_other_shapes(optimizer, workspace, tmp_path):
    run = workspace.run(None, 1, f"optimizer.name={optimizer}", "optimizer.learning_rate=1e-4")
    assert run.returncode == 0, run.output
    output = ["--checkpoint", "latest", "--output", str(tmp_path / "model")]
    assert commands.main(["export", str(run.directory), *output]) == 0
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found and all(torch.equal(found[name], run.weights[name]) for name in found)


@pytest.mark.parametrize("task", ["pretrain", "adapter", "classify"])
def test_an_export_in_another_dtype(task, runs, tmp_path, capsys):
    run = runs[task]
    arguments = ["--dtype", "bf16", "--license", "apache-2.0", "--output", str(tmp_path / "model")]
    assert commands.main(["export", str(run.directory), *arguments]) == 0
    name = "adapter_model.safetensors" if task == "adapter" else "model.safetensors"
    found, source = (load_file(folder / name) for folder in (tmp_path / "model", run.directory / "model"))
    assert found.keys() == source.keys()
    assert all(torch.equal(found[key], source[key].bfloat16()) for key in source)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        path.name for path in (run.directory / "model").iterdir()
    }
    if task == "pretrain":
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert commands.main(["evaluate", str(run.directory), "--model", str(tmp_path / "model")]) == 0
    assert commands.main(["export", str(run.directory), *arguments]) == 7  # never over a folder that is there


def test_an_adapters_checkpoint_is_its_export(runs, tmp_path):
    run = runs["adapter"]
    assert (
        commands.main(["export", str(run.directory), "--checkpoint", "latest", "--output", str(tmp_path / "model")])
        == 0
    )
    name = "adapter_model.safetensors"
    found, source = (load_file(folder / name) for folder in (tmp_path / "model", run.directory / "model"))
    assert found.keys() == source.keys() and all(torch.equal(found[key], source[key]) for key in source)


def test_a_damaged_checkpoint_is_named(runs, tmp_path, capsys):
    source = runs["sft"].checkpoint(STEPS)
    copy = tmp_path / source.name
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damaged = bytearray((copy / "rank_00000.safetensors").read_bytes())
    damaged[-1] ^= 1
    (copy / "rank_00000.safetensors").write_bytes(damaged)
    arguments = ["--checkpoint", str(copy), "--output", str(tmp_path / "model")]
    assert commands.main(["export", str(runs["sft"].directory), *arguments]) == 4
    assert "rank_00000.safetensors: expected sha256" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_whose_data_changed_is_refused(runs, rows, tmp_path, capsys):
    """Its tokenizer was trained on them: another one would give the weights other tokens."""
    path = Path(rows["sft"])
    before = path.read_text()
    path.write_text(before + json.dumps({"prompt": "new", "completion": "words"}) + "\n")
    try:
        arguments = ["--checkpoint", "latest", "--output", str(tmp_path / "model")]
        assert commands.main(["export", str(runs["sft"].directory), *arguments]) == 4
    finally:
        path.write_text(before)
    assert "the model or data differ from the checkpoint's" in capsys.readouterr().err
