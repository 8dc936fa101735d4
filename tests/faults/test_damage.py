"""Every kind of file of a real checkpoint, damaged in every way: it is named, and the older good one is taken.

And files that somebody else made: nothing in a checkpoint is run as code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from harness import ROOT, Run, Workspace

from samecurve.checkpoint.files import Reader
from samecurve.checkpoint.filesystem import LocalFileSystem
from samecurve.checkpoint.finder import Finder, read_state
from samecurve.checkpoint.verify import check
from samecurve.errors import CheckpointError
from samecurve.world import World

FILES = ["rank_00000.safetensors", "rank_00001.safetensors", "state.json", "index.json", "manifest.json", "COMMITTED"]
NEWEST, OLDER = "step_00000025", "step_00000020"
PAGE = 4096


@pytest.fixture(scope="module")
def workspace(battery) -> Workspace:
    return battery.workspace


@pytest.fixture(scope="module")
def finished(workspace: Workspace) -> Run:
    run = workspace.run("ddp", 2, "batch.micro_batch_size=4", "checkpoint.keep=2")
    assert run.returncode == 0, run.output
    return run


@pytest.fixture
def checkpoints(finished: Run, tmp_path: Path) -> Path:
    """A copy of the two newest checkpoints of a run of two processes."""
    assert sorted(path.name for path in (finished.directory / "checkpoints").iterdir()) == [OLDER, NEWEST]
    return Path(shutil.copytree(finished.directory / "checkpoints", tmp_path / "checkpoints"))


def deleted(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def one_byte_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flipped_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def zeroed_page(path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = min(PAGE, len(content) // 2)
    content[start : start + PAGE] = bytes(min(PAGE, len(content) - start))
    path.write_bytes(content)


def of_another_step(path: Path) -> None:
    shutil.copy(path.parents[1] / OLDER / path.name, path)


DAMAGES = [deleted, empty, half, one_byte_short, flipped_bit, zeroed_page, of_another_step]


def finder(checkpoints: Path, said: list[str]) -> Finder:
    facts = read_state(checkpoints / OLDER)
    return Finder(checkpoints, facts | {"recipe": facts["recipe"] | {"steps": 100}}, World(), said.append)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_and_the_older_one_is_taken(name, damage, checkpoints):
    path = checkpoints / NEWEST / name
    before = path.read_bytes()
    damage(path)
    if damage is of_another_step and name == "index.json":
        assert path.read_bytes() == before  # the same parameters in the same ranges: there is nothing to find
        return
    assert not path.exists() or path.read_bytes() != before
    (problem,) = check(LocalFileSystem(), checkpoints / NEWEST)
    # the marker is what says which manifest is the right one
    assert problem.file == name or (name, problem.file) == ("COMMITTED", "manifest.json")
    assert problem.expected != problem.found
    said: list[str] = []
    assert finder(checkpoints, said).find("auto") == checkpoints / OLDER
    assert f"{NEWEST}/{problem.file}: expected {problem.expected}, found {problem.found}" in said[0]


def test_all_are_damaged_and_all_are_named(checkpoints):
    looking = finder(checkpoints, [])
    flipped_bit(checkpoints / NEWEST / "rank_00001.safetensors")
    deleted(checkpoints / OLDER / "state.json")
    with pytest.raises(CheckpointError) as error:
        looking.find("auto")
    text = str(error.value)
    assert f"{NEWEST}/rank_00001.safetensors: expected sha256" in text and f"{OLDER}/state.json: expected" in text
    assert "--start_over" in text


def test_a_whole_run_goes_on_from_the_older_one_or_not_at_all(finished, workspace, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished.directory, directory)
    flipped_bit(directory / "checkpoints" / NEWEST / "rank_00000.safetensors")
    command = [os.sys.executable, "train.py", str(workspace.recipe), f"output_dir={directory}"]
    command += ["batch.micro_batch_size=8", "checkpoint.keep=2"]
    run = workspace.execute(command, directory)
    assert run.returncode == 0, run.output
    assert f"{NEWEST}/rank_00000.safetensors: expected sha256" in run.output
    assert f"going on from {directory / 'checkpoints' / OLDER}" in run.output
    assert run.column("step") == list(range(1, 26))
    for name in (NEWEST, OLDER):
        empty(directory / "checkpoints" / name / "COMMITTED")
    run = workspace.execute(command, directory)
    assert run.returncode == 4 and run.output.count("CheckpointError (exit code 4)") == 1, run.output
    status = json.loads((directory / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    assert len(run.metrics) == 25  # nothing was started over


# What somebody else made


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def committed_again(folder: Path, *added: str) -> None:
    """Manifest and marker for what is in the folder now, as anyone can make them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    names = [file["name"] for file in manifest["files"]] + list(added)
    manifest["files"] = [
        {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name in names
        for content in [(folder / name).read_bytes()]
    ]
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMITTED").write_text(json.dumps({"manifest_sha256": hashlib.sha256(text).hexdigest()}))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["rank_00000.safetensors", "state.json", "index.json"])
def test_no_pickle_is_opened(name, kind, finished, workspace, tmp_path):
    folder, canary = tmp_path / "step_00000020", tmp_path / "canary"
    shutil.copytree(finished.directory / "checkpoints" / OLDER, folder)
    if kind == "pickle":
        (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    else:
        torch.save({"weight": Canary(canary)}, folder / name)
    committed_again(folder)
    assert check(LocalFileSystem(), folder) == []  # its hashes are right
    with pytest.raises(CheckpointError, match=re.escape(name)):
        read_state(folder)
        Reader(folder).read("model.norm.weight", "weight", 0, 4)
    assert not canary.exists()


def test_files_that_are_not_ours_are_not_opened(checkpoints, tmp_path):
    canary = tmp_path / "canary"
    for name in ("optimizer.pt", "model.bin", ".metadata", "rng_state.pkl", "__0_0.distcp"):
        (checkpoints / NEWEST / name).write_bytes(pickle.dumps(Canary(canary)))
    assert finder(checkpoints, []).find("auto") == checkpoints / NEWEST
    assert not canary.exists()


def test_nothing_here_can_unpickle():
    sources = [ROOT / "train.py", *(ROOT / "samecurve").rglob("*.py")]
    assert len(sources) > 50
    forbidden = re.compile(r"\b(torch\.load|pickle|shelve|joblib|allow_pickle|marshal|eval\()")
    found = [f"{path}: {match[0]}" for path in sources for match in forbidden.finditer(path.read_text())]
    # an engine's or a model's evaluation mode is called eval
    assert [text for text in found if not text.endswith("eval(")] == []
