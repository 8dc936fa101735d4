"""A checkpoint from a stranger: whatever is in its files, nothing in them is executed, and the error is a line."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from battery import SINGLE
from harness import ROOT
from safetensors.torch import load_file, save_file

from samecurve.checkpoint.format import CheckpointReader
from samecurve.checkpoint.manifest import check_files
from samecurve.checkpoint.resume import read_state
from samecurve.errors import CheckpointError
from samecurve.interfaces.region import Region
from samecurve.storage.filesystem import LocalFileSystem

RANK, STATE, INDEX = "rank_00000.safetensors", "state.json", "index.json"
DEEP = b"[" * 100_000 + b"]" * 100_000


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def canary(tmp_path) -> Path:
    path = tmp_path / "canary"
    pickle.loads(pickle.dumps(Canary(path)))
    assert path.exists(), "it would not show that it was unpickled"
    path.rmdir()
    return path


@pytest.fixture
def folder(battery, tmp_path) -> Path:
    source = battery.golden(SINGLE).checkpoint(10)
    return Path(shutil.copytree(source, tmp_path / source.name))


def seal(folder: Path, **more) -> None:
    """Manifest and marker for whatever the folder holds now: hashes protect against damage, not against a person."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in ("manifest.json", "COMMITTED"))
    files = [{"name": name, **_measured(folder / name)} for name in names]
    write_manifest(folder, {"step": 10, "world_size": 1, "files": files, **more})


def _measured(path: Path) -> dict:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_manifest(folder: Path, content: dict | bytes) -> None:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(text)
    marker = {"manifest_sha256": hashlib.sha256(text).hexdigest()}
    (folder / "COMMITTED").write_text(json.dumps(marker))


def _pickled(canary: Path) -> bytes:
    return pickle.dumps(Canary(canary))


def _torch_saved(canary: Path, path: Path) -> None:
    with open(path, "wb") as stream:
        torch.save({"weight": Canary(canary)}, stream)


def read_all(folder: Path) -> None:
    """What a run reads, in its order."""
    assert check_files(LocalFileSystem(), folder) == []
    read_state(folder)
    reader = CheckpointReader(folder)
    for name, shape in reader.shapes.items():
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            reader.read(name, kind, Region(0, torch.Size(shape).numel()))
    reader.tensor(0, "rng/torch_cpu")


FORGED: dict[str, Callable[[Path, Path], object]] = {
    "a pickle named state.json": lambda folder, canary: (folder / STATE).write_bytes(_pickled(canary)),
    "a pickle named index.json": lambda folder, canary: (folder / INDEX).write_bytes(_pickled(canary)),
    "torch.save named safetensors": lambda folder, canary: _torch_saved(canary, folder / RANK),
    "a pickle named safetensors": lambda folder, canary: (folder / RANK).write_bytes(_pickled(canary)),
    "a header of 2**63 bytes": lambda folder, _: (folder / RANK).write_bytes(struct.pack("<Q", 2**63) + b"{}"),
    "deep state.json": lambda folder, _: (folder / STATE).write_bytes(DEEP),
    "deep index.json": lambda folder, _: (folder / INDEX).write_bytes(DEEP),
    "a list as state.json": lambda folder, _: (folder / STATE).write_bytes(b"[1]"),
    "an index that leaves values out": lambda folder, _: _change_index(folder, [[0, 0, 7]]),
    "an index of a rank that is not there": lambda folder, _: _change_index(folder, [[7, 0, 9600]]),
    "an index of a rank that is a path": lambda folder, _: _change_index(folder, [["../../x", 0, 9600]]),
    "tensors of other lengths": lambda folder, _: _shorten(folder / RANK),
}


def _change_index(folder: Path, ranges: list) -> None:
    content = json.loads((folder / INDEX).read_text())
    next(iter(content.values()))["ranges"] = ranges
    (folder / INDEX).write_text(json.dumps(content))


def _shorten(path: Path) -> None:
    save_file({name: tensor[:1].clone() for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
def test_nothing_is_executed_and_the_error_is_ours(forge, folder, canary):
    forge(folder, canary)
    seal(folder)
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert str(folder) in str(caught.value)
    assert not canary.exists()


def test_the_same_steps_read_a_good_one(folder):
    seal(folder)
    read_all(folder)


def test_files_that_other_tools_would_load_are_ignored(folder, canary):
    for name in ("optimizer.pt", "pytorch_model.bin", "random_states_0.pkl", "__0_0.distcp", ".metadata"):
        _torch_saved(canary, folder / name)
        (folder / f"raw_{name}").write_bytes(_pickled(canary))
    read_all(folder)  # not in the manifest
    seal(folder)
    read_all(folder)  # in the manifest
    assert not canary.exists()


ENTRY = {"name": RANK, "size": 1, "sha256": "0" * 64}
MANIFESTS: dict[str, dict | bytes] = {
    "out of the folder": {"step": 10, "world_size": 1, "files": [{**ENTRY, "name": "../../x"}]},
    "absolute": {"step": 10, "world_size": 1, "files": [{**ENTRY, "name": "/etc/passwd"}]},
    "with a drive": {"step": 10, "world_size": 1, "files": [{**ENTRY, "name": "C:x"}]},
    "the folder itself": {"step": 10, "world_size": 1, "files": [{**ENTRY, "name": ".."}]},
    "with a NUL": {"step": 10, "world_size": 1, "files": [{**ENTRY, "name": "x\0y"}]},
    "a huge size": {"step": 10, "world_size": 1, "files": [{**ENTRY, "size": 10**30}]},
    "a negative size": {"step": 10, "world_size": 1, "files": [{**ENTRY, "size": -1}]},
    "a huge world": {"step": 10, "world_size": 10**18, "files": [ENTRY]},
    "no rank": {"step": 10, "world_size": 0, "files": [ENTRY]},
    "one file twice": {"step": 10, "world_size": 1, "files": [ENTRY, ENTRY]},
    "a text as size": {"step": 10, "world_size": 1, "files": [{**ENTRY, "size": "1"}]},
    "true as step": {"step": True, "world_size": 1, "files": [ENTRY]},
    "deep": DEEP,
    "not UTF-8": b"\xff\xfe{}",
    "a huge number": b'{"step": ' + b"9" * 100_000 + b"}",
}


@pytest.mark.parametrize("content", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_hostile_manifest_is_a_problem_and_nothing_else(content, folder):
    write_manifest(folder, content)
    problems = check_files(LocalFileSystem(), folder)
    assert len(problems) == 1 and len(str(problems[0])) < 400


# The processes of a rehearsal and of a prediction get their plan through a pipe from the one that starts them; no file
# is read.
THROUGH_A_PIPE = {"rehearsal.py", "rehearsal_process.py", "settle.py", "forecast.py"}
BY_LISTED_CLASSES = {"foreign.py", "foreign_formats.py"}  # an unpickler that finds no others, see test_adopt.py


def test_no_code_unpickles():
    """No pickle or allow_pickle in what runs, torch.load for weights only. safetensors and JSON hold no code."""
    modules = [ROOT / "train.py", *(ROOT / "samecurve").rglob("*.py")]
    assert len(modules) > 50
    for path in (path for path in modules if path.name not in THROUGH_A_PIPE):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            names = [name for name in names if name != "pickle" or path.name not in BY_LISTED_CLASSES]
            assert not {"pickle", "dill", "joblib", "cloudpickle", "marshal", "shelve"} & {*names}, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if called == "torch.load":
                    assert options.get("weights_only") == "True", f"{path}:{node.lineno}"
                assert called not in ("eval", "exec", "pickle.load", "pickle.loads"), f"{path}:{node.lineno}"
                assert "allow_pickle" not in options, f"{path}:{node.lineno}"  # numpy's default refuses them


@pytest.mark.parametrize("name", ["torch.save named safetensors", "a pickle named state.json"])
def test_a_run_that_is_given_one_ends_with_code_4(name, folder, canary, battery):
    FORGED[name](folder, canary)
    seal(folder)
    started = battery.victim(SINGLE).start("", "", "--resume", str(folder))
    started.wait()
    assert started.process.returncode == 4, started.output
    assert started.output.count("CheckpointError (exit code 4)") == 1
    assert "Traceback" not in started.output and not canary.exists()
