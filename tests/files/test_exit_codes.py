"""The exit codes of the real train.py, one process: what a job script branches on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = {
    "steps": 2,
    "precision": "fp32",
    "model": {"config": {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "tokenizer": {"vocabulary_size": 300},
    "batch": {"global_batch_size": 2, "sequence_length": 16},
    "optimizer": {"learning_rate": 1e-3},
}


def train(folder: Path, text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    (folder / "data.txt").write_text(text)
    recipe = {**RECIPE, "output_dir": str(folder / "run"), "data": {"path": str(folder / "data.txt")}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    env = os.environ | {"SAMECURVE_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, str(ROOT / "train.py"), str(folder / "recipe.yaml"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "arguments", "environment", "code", "message"),
    [
        ("words " * 200, ["steps=x"], {}, 2, "steps: found"),
        ("", [], {}, 3, "data.txt"),
        ("words " * 200, [], {"WORLD_SIZE": "4", "RANK": "0"}, 6, "WORLD_SIZE"),
        ("words " * 200, ["output_dir=/dev/null/run"], {}, 7, "/dev/null/run"),
    ],
    ids=["configuration", "data", "topology", "storage"],
)
def test_failures(text, arguments, environment, code, message, tmp_path):
    done = train(tmp_path, text, *arguments, **environment)
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    if code == 3:
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("failed", 3)
    else:
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("saved_every", [0, 1])
def test_a_short_run_that_diverges_ends_with_code_5_and_without_a_model(saved_every, tmp_path):
    """The first update makes weights of 1e30, and the two steps after it are skipped."""
    settings = ["steps=3", "optimizer.learning_rate=1e30", f"checkpoint.every_steps={saved_every}"]
    done = train(tmp_path, "words of many kinds, " * 200, *settings)
    assert done.returncode == 5, done.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 5, 2)
    assert "no step after step 1 was applied" in status["reason"] and done.stderr.count("NumericError") == 1
    assert len((tmp_path / "run" / "skipped.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "run" / "checkpoints" / "step_00000003").exists()


def test_done(tmp_path):
    done = train(tmp_path, "words of many kinds, " * 200)
    assert done.returncode == 0, done.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 2)
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "run.json",
        "metrics.jsonl",
        "status.json",
        "model",
        "tensorboard",
    }
