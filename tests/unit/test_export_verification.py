"""The check of an export in a new process; tests/distributed/test_export_verified.py has it at the end of runs."""

from __future__ import annotations

import ast
import json
import math
from importlib import metadata
from pathlib import Path

import pytest
import torch
from test_export import export_to, trained_and_skeleton, weights

from samecurve.config.schema import Export, Recipe
from samecurve.errors import CheckpointError, NumericError
from samecurve.export import model_card, reload
from samecurve.export.verification import Verification, sample_batch


def recipe(**changes) -> Recipe:
    values = {
        "output_dir": "run",
        "steps": 1,
        "precision": "fp32",
        "model": {"config": {"model_type": "llama"}},
        "data": {},
        "batch": {"global_batch_size": 1, "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"warmup_steps": 0},
    }
    return Recipe.model_validate(values | changes)


@torch.no_grad()
def exported(tmp_path, name="llama_untied") -> tuple[Path, Verification]:
    trained, skeleton = trained_and_skeleton(name)
    export_to(tmp_path / "model.partial", skeleton, weights(trained).items())
    batch = sample_batch(skeleton, recipe())
    verification = Verification(recipe(), batch, trained(**batch.inputs).logits, tmp_path / "rejected_model")
    return tmp_path / "model.partial", verification


@pytest.mark.full  # every day test_export_verified.py has it
def test_a_right_export_passes(tmp_path):
    folder, verification = exported(tmp_path)
    assert verification.batch.inputs["input_ids"].shape == (2, 16)
    verification(folder)
    version = metadata.version("transformers")
    assert verification.result.startswith(
        f"export reloaded by transformers {version}: logits differ by at most 0.0e+00 ("
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model.partial"]


def test_an_export_with_another_config_is_moved_aside(tmp_path):
    """All weights are right, and yet the model computes something else."""
    folder, verification = exported(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    with pytest.raises(NumericError) as error:
        verification(folder)
    message = str(error.value)
    assert message.startswith(
        f"{tmp_path / 'rejected_model'}: the exported model was moved here, because it is not the"
    )
    assert "is allowed in fp32. The run's checkpoints are complete; with export.verify=off the same command" in message
    assert verification.result == ""
    assert [path.name for path in tmp_path.iterdir()] == ["rejected_model"]


@pytest.mark.full
def test_an_export_that_cannot_be_loaded_is_moved_aside(tmp_path):
    folder, verification = exported(tmp_path)
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(CheckpointError, match="because transformers cannot load it:\n(.|\n)*unheard_of"):
        verification(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["rejected_model"]


# difference, largest output, rounding, and whether it passes: 1e-4 of the largest, or 8 times what bf16 itself changes
BY_HAND = [
    ("fp32", "off", 0.9e-3, 10.0, 0.0, True),
    ("fp32", "off", 1.1e-3, 10.0, 0.0, False),
    ("fp32", "off", math.nan, 10.0, 0.0, False),
    ("bf16", "off", 0.39, 10.0, 0.05, True),
    ("bf16", "off", 0.41, 10.0, 0.05, False),
    ("bf16", "tensorwise", 6.3, 10.0, 0.05, True),
    ("bf16", "tensorwise", 6.5, 10.0, 0.05, False),
]


@pytest.mark.parametrize(("precision", "fp8", "difference", "largest", "rounding", "passes"), BY_HAND)
def test_limits_by_hand(precision, fp8, difference, largest, rounding, passes, tmp_path, monkeypatch):
    found = {"transformers": "5", "difference": difference, "largest": largest, "rounding": rounding}
    monkeypatch.setattr(Verification, "_reload", lambda self, folder: found)
    folder = tmp_path / "model.partial"
    folder.mkdir()
    chosen = recipe(precision=precision, fp8=fp8)
    batch = sample_batch(trained_and_skeleton("llama_tied")[1], chosen)
    verification = Verification(chosen, batch, torch.zeros(1), tmp_path / "rejected_model")
    if passes:
        verification(folder)
    else:
        with pytest.raises(NumericError, match=r"export\.verify=off"):
            verification(folder)
    assert folder.exists() == passes == bool(verification.result)


def test_the_new_process_imports_nothing_of_ours():
    tree = ast.parse(Path(reload.__file__).read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    found = {alias.name if isinstance(node, ast.Import) else node.module for node in nodes for alias in node.names}
    assert {name.split(".")[0] for name in found} == {
        "__future__",
        "json",
        "pathlib",
        "safetensors",
        "peft",
        "sys",
        "torch",
        "transformers",
    }
    assert reload.ADAPTED_CONFIG == model_card.ADAPTED_CONFIG


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("1B", {10**9: True, 10**9 + 1: False}),
        ("1.5M", {1_500_000: True, 1_500_001: False}),
        (False, {1: False}),
        (0, {1: False}),
    ],
)
def test_sizes(given, sizes):
    export = Export.model_validate({"verify": given})
    assert {size: export.verifies(size) for size in sizes} == sizes


def test_a_size_that_is_none():
    with pytest.raises(ValueError, match="expected a number of parameters such as 350M or 7B, or off"):
        Export.model_validate({"verify": "big"})
