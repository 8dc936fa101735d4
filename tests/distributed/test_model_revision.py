"""A model of the hub is read at one commit, which a resumed run keeps while the branch moves on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness import LORA, Run, launch_command
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from samecurve.config.adapter_folder import base_path

NAME = "someone/tiny"
OLD, NEW = "a" * 40, "b" * 40  # commits; main is NEW, v1 is OLD
STEPS = ("steps=4", "checkpoint.every_steps=4", "schedule.warmup_steps=1", LORA)


@pytest.fixture(scope="module")
def cache(workspace) -> Path:
    """A cache of the hub with two commits of a model, whose weights differ."""
    folder = workspace.folder / "hub" / "models--someone--tiny"
    for commit in (OLD, NEW):
        shutil.copytree(workspace.base, folder / "snapshots" / commit)
    weights = folder / "snapshots" / NEW / "model.safetensors"
    save_file({name: 1.5 * value for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    (folder / "refs").mkdir()
    (folder / "refs" / "v1").write_text(OLD)
    (folder / "refs" / "main").write_text(NEW)
    return folder


def train(workspace, cache: Path, directory: Path, strategy: str | None, world: int, *overrides: str) -> Run:
    # not "fork", whose server has read the cache's place from its own environment
    command = launch_command("torchrun" if strategy else "python", None, world, workspace.folder)
    command += [str(workspace.recipe), f"output_dir={directory}", f"model={{path: {NAME}}}", "tokenizer={}", *STEPS]
    command += [*overrides, *(["--strategy", str(workspace.strategy(strategy))] if strategy else [])]
    run = workspace.execute(command, directory, HF_HUB_CACHE=str(cache.parent))
    assert run.returncode == 0, run.output
    return run


def test_a_run_reads_one_commit_and_keeps_it(workspace, cache, tmp_path, monkeypatch):
    old = train(workspace, cache, tmp_path / "old", None, 1, "model.revision=v1")
    assert old.facts["recipe"]["model"]["revision"] == OLD
    local = workspace.run(None, 1, *workspace.lora[:2], *STEPS)
    assert old.column("loss") == local.column("loss")

    new = train(workspace, cache, tmp_path / "new", "ddp", 2)
    assert new.facts["recipe"]["model"]["revision"] == NEW and new.column("loss")[0] != old.column("loss")[0]
    adapter = json.loads((new.directory / "model" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, NEW)

    (cache / "refs" / "main").write_text(OLD)
    resumed = train(workspace, cache, tmp_path / "new", None, 1, "steps=6")
    assert resumed.facts["recipe"]["model"]["revision"] == NEW
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.parent))
    assert Path(str(base_path(new.directory / "model"))).name == NEW

    moved = train(workspace, cache, tmp_path / "old", None, 1, "steps=6", f"model.revision={OLD}")
    assert "model.revision" not in moved.output
