"""`prove` on recipes: what it says of a right one, and of planted errors that leave a plausible curve."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import LLAMA, ROOT

from samecurve.bench import jobs
from samecurve.cli import prove as command_prove
from samecurve.cli.commands import main
from samecurve.data import chat_encoder
from samecurve.prove.process import OF_TWINS
from samecurve.prove.recipe import Proof
from samecurve.prove.script import Processes
from samecurve.prove.twin import derive

# in the ranks alone: the loop and the other processes of the command start as ever
PLANTS = {
    "mean of means": """
from samecurve.tasks.causal_lm import CausalTask
whole = CausalTask.loss
CausalTask.loss = lambda task, logits, labels: whole(task, logits, labels) / (labels != -100).sum().clamp(min=1)
CausalTask.count = lambda task, labels: int((labels != -100).any())
""",
    "frozen moves": """
import torch
def drift(module, *_):
    if isinstance(module, torch.nn.Embedding) and module.training:
        module.weight.data.mul_(1 + 1e-3)
torch.nn.modules.module.register_module_forward_hook(drift)
""",
}


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    """Conversations of uneven lengths for a small Llama whose embedding is frozen."""
    monkeypatch.setenv("SAMECURVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {n}"},
                {"role": "assistant", "content": f"{n} is " * (n % 9 + 1)},
            ]
        }
        for n in range(80)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "task": "sft",
        "steps": 50,
        "precision": "fp32",
        "output_dir": str(tmp_path / "run"),
        "model": {"config": {**LLAMA, "tie_word_embeddings": False}},
        "tokenizer": {"vocabulary_size": 300},
        "data": {"path": str(tmp_path / "chats.jsonl"), "packing": False, "validation_fraction": 0.1},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 64},
        "optimizer": {"learning_rate": 1e-3, "groups": [{"pattern": "embed_tokens.*", "frozen": True}]},
        "loss": {"implementation": "full"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "recipe.yaml"


def plant(name: str, folder: Path, monkeypatch) -> None:
    (folder / "plants").mkdir()
    code = f"import sys\nif 'samecurve.prove.process' in sys.orig_argv[:3]:\n    exec({PLANTS[name]!r})\n"
    (folder / "plants" / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'plants'}:{ROOT}")


def prove(recipe: Path, *words: str) -> tuple[int, dict]:
    output = recipe.parent / "proof"
    code = main(["prove", str(recipe), *words, "--strategies", "ddp", "--output", str(output)])
    return code, json.loads((output / "certificate.json").read_text())


def kinds(certificate: dict) -> set[str]:
    return {finding["kind"] for strategy in certificate["strategies"] for finding in strategy["findings"]}


def test_a_mean_of_means_is_found(recipe, monkeypatch):
    plant("mean of means", recipe.parent, monkeypatch)
    with Processes(OF_TWINS) as processes:
        proof = Proof(processes, derive(str(recipe), [], recipe.parent / "proof"))
        assert not proof.twin.problems and not proof.why_nothing_is_shown()
        assert set(proof.twin.trained) == {"assistant", "ends of turns", "the template", "user"}
        verdict, _ = proof.judge_start(jobs.jobs(["ddp"], 4)[0])  # not the number of its file
    assert [(finding.kind, finding.step) for finding in verdict.findings] == [("loss", 1), ("norm", 1)]
    assert verdict.largest["rows"] == 0 and 1e-3 < (verdict.largest["loss"] or 0) < 0.5  # it looks like any other curve


@pytest.mark.full
def test_a_right_recipe_passes(recipe, capsys):
    code, proof = prove(recipe)
    assert code == 0 and proof["passes"] and proof["model_card"] and not kinds(proof)
    assert [strategy["strategy"] for strategy in proof["strategies"]] == ["single", "ddp"]
    for strategy in proof["strategies"]:
        expected = dict.fromkeys(("rows", "loss", "norm", "resume", "weights", "export"), "PASS")
        assert strategy["checks"] == {**expected, "precision": "not judged"}
    folder = recipe.parent / "proof"
    assert (folder / "chart.svg").read_text().startswith("<svg") and "ddp" in capsys.readouterr().out
    lines = (folder / "judge.py").read_text().splitlines()
    assert len(lines) <= 60 and not any("samecurve" in line for line in lines)
    command = [sys.executable, "-P", str(folder / "judge.py")]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True)
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines()]
    metrics = [json.loads(line) for line in (folder / "ddp" / "resumed" / "metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx([record["loss"] for record in metrics], rel=1e-6) and len(losses) == 6


@pytest.mark.full
def test_a_frozen_weight_that_moves_is_found(recipe, monkeypatch):
    plant("frozen moves", recipe.parent, monkeypatch)
    code, proof = prove(recipe)
    found = proof["strategies"][1]["findings"]  # its export is refused, as frozen weights are those of the start there
    assert code == 1 and [finding["kind"] for finding in found] == ["loss", "norm", "resume"]
    assert "the exported model was moved here, because it is not the trained one" in found[2]["text"]


@pytest.mark.full
def test_a_dead_model_proves_nothing(recipe):
    code, proof = prove(recipe, "optimizer.learning_rate=1e-30")
    assert code == 1 and "no weight moves" in proof["shows_nothing"] and not proof["strategies"]


def test_a_wrong_mask_is_found(recipe, monkeypatch):
    everything = lambda offsets, spans: chat_encoder.np.ones(len(offsets), dtype=bool)  # noqa: E731
    monkeypatch.setattr(chat_encoder, "overlap", everything)
    twin = derive(str(recipe), [], recipe.parent / "proof")
    assert any("tokens of user are trained" in problem for problem in twin.problems)
    assert any("tokens of the template are trained" in problem for problem in twin.problems)


def test_the_workflow_runs_the_command():
    content = yaml.safe_load((ROOT / "docs" / "prove_workflow.yml").read_text())
    (job,) = content["jobs"].values()
    assert set(content) == {"name", True, "jobs"} and "pull_request" in content[True]  # YAML 1.1 reads `on` as true
    (command,) = (step["run"] for step in job["steps"] if "prove" in step.get("run", ""))
    parser = argparse.ArgumentParser()
    command_prove.add_arguments(parser)
    assert parser.parse_args(command.split()[4:]).output == Path("proof")
    assert all(("uses" in step) != ("run" in step) for step in job["steps"])
