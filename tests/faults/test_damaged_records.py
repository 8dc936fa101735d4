"""Every file of a finished run and of a model folder, damaged in every way, under every command that reads it.

A command ends with a code of docs/failures.md and one message. It never takes damaged weights, states or tokenizers for
good ones. The everyday run leaves out combinations that load a model again and again; `-m full` has all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import ROOT
from safetensors.torch import load_file
from saved_state import seal

from samecurve.checkpoint.format import CheckpointReader
from samecurve.checkpoint.resume import CheckpointSelector, read_state, state_problems
from samecurve.cli import commands
from samecurve.config import loader
from samecurve.config.schema import Recipe
from samecurve.data.datasets.streaming import MixedStreams, StreamRows
from samecurve.data.sampler import Steps, rows_in_steps
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import CheckpointError, SamecurveError
from samecurve.export.model_card import ExportInfo, model_card
from samecurve.interfaces.region import Region
from samecurve.metrics.meter import Meter
from samecurve.run.beats import read_beat
from samecurve.run.run_directory import RunDirectory
from samecurve.storage.checksums import SUMS, check_checksums, write_checksums
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.training import settle
from samecurve.training.evaluator import EarlyStopping
from samecurve.training.startup import rate_change

CODES = {0, 2, 3, 4, 5, 6, 7}
MODEL = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
RECIPE = {
    "steps": 2,
    "model": {"config": MODEL},
    "tokenizer": {"vocabulary_size": 300},
    "data": {"path": "data.jsonl", "cache_dir": "cache", "validation_fraction": 0.1},
    "batch": {"global_batch_size": 8, "micro_batch_size": 8, "sequence_length": 32},
    "evaluate": {"every_steps": 0},
    "checkpoint": {"every_steps": 1},
    "export": {"verify": "off"},
    "output_dir": "run",
}


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 4 for byte in content[middle : middle + 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "absent": lambda content: None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "one bit": _flip,
    "0xff": lambda content: content[:5] + b"\xff" + content[6:],
    "NULs": lambda content: bytes(len(content)),
    "brackets": lambda content: b"[" * 100_000,
    "a list": lambda content: b"[1]",
    "a text": lambda content: b'"text"',
    "null": lambda content: b"null",
}


@pytest.fixture(scope="session")
def origin(tmp_path_factory) -> Path:
    """A finished run in run/, beside its data and cache."""
    folder = tmp_path_factory.mktemp("damaged")
    rows = [
        json.dumps({"text": f"row {number} of {number * 7919 % 101} and more words to fill it"}) for number in range(99)
    ]
    (folder / "data.jsonl").write_text("\n".join(rows))
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    command = [sys.executable, str(ROOT / "train.py"), "recipe.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "run" / "skipped.jsonl").write_text('{"step": 1, "reason": "loss", "rows": [1, 2]}\n')
    (folder / "run" / "samples.jsonl").write_text('{"step": 1, "prompt": "a", "text": "b", "seed": 0}\n')
    return folder


@pytest.fixture(scope="session")
def adapted(origin) -> Path:
    """A folder with an adapter of the run's model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(origin / "run" / "model")
    folder = origin / "adapter"
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(origin / "run" / "model" / name, folder / name)
    return folder


@pytest.fixture
def run(origin, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(origin)
    return Path(shutil.copytree(origin / "run", tmp_path / "run"))


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damaged(path: Path, how: str) -> bytes:
    """Damage a file and return what it was; skip where this changes nothing."""
    before = path.read_bytes()
    after = DAMAGES[how](before)
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)
    return before


def ends(words: list[Any], capsys) -> tuple[int, str]:
    """Run a command in this process. Returns (exit code, its output)."""
    code = commands.main([str(word) for word in words])
    output = "".join(capsys.readouterr())
    assert code in CODES, output
    assert "Traceback" not in output
    return code, output


def resumed(run: Path, golden: Path) -> None:
    """Read what a resume reads, in its order, and write the card; damaged tensors must not come out of it."""
    facts = read_state(golden / "checkpoints" / "step_00000002")
    directory = RunDirectory(run, resume="auto")
    try:
        if directory.continues:
            selector = CheckpointSelector(directory.checkpoints, facts, ControlGroup(), print, LocalFileSystem())
            folder = selector.select("auto")
            assert folder is not None
            state, whole = read_state(folder), golden / "checkpoints" / folder.name
            assert state == read_state(whole)
            reader = CheckpointReader(folder)
            for name, values in load_file(whole / "rank_00000.safetensors").items():
                if name.startswith("weight/"):
                    read = reader.read(name.removeprefix("weight/"), "weight", Region(0, values.numel()))
                    assert torch.equal(read, values)
            directory.begin(state["step"], state["record"])
        for path in run.glob("heartbeats/rank_*.json"):
            read_beat(path)
        assert model_card(run, ExportInfo())
    except SamecurveError as error:
        assert error.exit_code in CODES and str(error)
    finally:
        directory.close()


def damages_of(run: Path, within: str = "") -> Iterator[tuple[str, str]]:
    for name in names(run):
        if name.startswith(within) and not name.startswith("tensorboard/"):
            yield from ((name, how) for how in DAMAGES)


def places(value: Any, depth: int) -> Iterator[tuple]:
    """Paths of keys to everything in a JSON object down to a depth."""
    if isinstance(value, dict) and depth:
        for key, inner in value.items():
            yield (key,)
            yield from ((key, *rest) for rest in places(inner, depth - 1))


WRONG: tuple[Any, ...] = (None, "text", [1], {"a": {}}, 2**70, -1)


def changed(content: dict, path: tuple) -> Iterator[dict]:
    """Copies of an object without a key, and with a value of every other kind under it."""
    for value in ("absent", *WRONG):
        copy = json.loads(json.dumps(content))
        inner = copy
        for key in path[:-1]:
            inner = inner[key]
        if value == "absent":
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        if copy != content:
            yield copy


# a part of the cases every day: of so many one, and another one for each file or key in turn
EVERY = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])


def test_a_file_name_that_is_not_utf8_has_a_hash_too(tmp_path):
    (tmp_path / os.fsdecode(b"q\xff.py")).write_text("a")
    write_checksums(tmp_path)
    check_checksums(tmp_path)
    (tmp_path / os.fsdecode(b"q\xff.py")).write_text("b")
    with pytest.raises(CheckpointError, match="differs from what was written"):
        check_checksums(tmp_path)


@EVERY
def test_records_cost_what_they_hold(every, run, origin, tmp_path, capsys):
    """resume, report and summary, for every file; one test, because the files are known when the run is there."""
    cases = [case for case in damages_of(run) if not case[0].startswith("model/")][::every]
    assert len({name for name, _ in cases}) >= 15
    for name, how in cases:
        before = damaged(run / name, how)
        for command in ("report", "summary"):
            code, output = ends([command, run], capsys)
            if name.startswith(("checkpoints/", "heartbeats/", "skipped", "samples", "status")):
                assert code == 0, (name, how, output)
        copy = Path(shutil.copytree(run, tmp_path / "copy"))  # because a resume moves files
        resumed(copy, origin / "run")
        shutil.rmtree(copy)
        (run / name).write_bytes(before)


# one bit may leave a good file, or make another key of the recipe, which is refused by name
@pytest.mark.parametrize("how", [how for how in DAMAGES if how != "one bit"])
def test_a_damaged_run_json_costs_no_model(how, run, capsys):
    damaged(run / "run.json", how)
    assert ends(["generate", run, *MODEL_COMMANDS["generate"]], capsys)[0] == 0
    code, output = ends(["export", run, "--dtype", "bf16"], capsys)
    if how == "absent":
        assert code == 2 and "no run here" in output
        return
    assert (
        code == 0
        and "How this model was trained: run.json cannot be used" in (run / "model-bf16/README.md").read_text()
    )
    assert ends(["evaluate", run], capsys)[0] == 2  # which rows to read is in run.json alone


RECORDS = ("status.json", "heartbeats/rank_00000.json", "metrics.jsonl", "samples.jsonl")


@pytest.mark.parametrize(
    ("name", "every"),
    [*((name, 1) for name in RECORDS), ("run.json", 5), pytest.param("run.json", 1, marks=pytest.mark.full)],
)
def test_wrong_types_in_any_key_of_a_record(name, every, run, capsys):
    text = (run / name).read_text()
    content = json.loads(text.splitlines()[0] if name.endswith("l") else text)
    cases = [copy for path in places(content, 2) for copy in changed(content, path)]
    assert len(cases) > 20
    for case in cases[::every]:
        (run / name).write_text(json.dumps(case) + "\n" + (text if name.endswith("l") else ""))
        assert ends(["report", run], capsys)[0] == 0
        ends(["summary", run], capsys)
        assert model_card(run, ExportInfo())
        read_beat(run / "heartbeats" / "rank_00000.json")


@EVERY
def test_a_forged_state_is_refused_or_harmless(every, run, origin, monkeypatch, capsys):
    """Where a state does not fit, the older checkpoint is taken; what fits is a state of a run with other keys."""
    monkeypatch.setattr(commands, "do", lambda work: 0)
    facts = read_state(origin / "run" / "checkpoints" / "step_00000002")
    folder = run / "checkpoints" / "step_00000002"
    cases = [(path, copy) for path in places(facts, 2) for copy in changed(facts, path)]
    assert len(cases) > 500
    cases = cases[::every]
    refused = set()
    for path, case in cases:
        (folder / "state.json").write_text(json.dumps(case))
        seal(folder)
        selector = CheckpointSelector(run / "checkpoints", facts, ControlGroup(), lambda text: None, LocalFileSystem())
        try:
            if selector.select("auto") != folder:
                refused.add(path[0])
        except CheckpointError as error:  # of another model, or of other rows
            assert "cannot resume with these changes" in str(error)
        ends(["export", run, "--checkpoint", "latest"], capsys)
    types = {"format", "step", "updates", "samples", "meter", "record", "loss_scale", "recipe", "model", "data"}
    assert refused >= types | {"strategy", "world_size", "versions", "generators"}


STREAMED = (
    {"block": 1, "start": 4, "batch_size_from_0": 4, "batch_size_from_4": 8},
    {"sources": [{"block": 1, "start": 4}, {"block": 0, "start": 0}], "batch_size_from_0": 8},
)
STOPPING = ({"metric": "eval_loss", "value": 2.0, "step": 1, "evaluations_since": 3},)
STOPPING += ({"metric": "eval_loss", "evaluations_since": 3},)


def go_on_with(state: dict, recipe: Recipe, num_parts: int) -> None:
    """Whatever a start of a training reads in a state, each part by its own reader."""
    stopping, anchor = EarlyStopping(recipe, state.get("stopping", {})), state.get("anchor", {})
    assert not stopping.is_over or stopping.describe()
    stopping.evaluated(5, {"eval_loss": 1.0})
    rate_change(recipe, state)
    meter: Any = object.__new__(Meter)
    meter.state = state["meter"]
    steps = Steps.of(8, state["samples"], anchor)
    assert len(rows_in_steps(np.arange(state["samples"], state["samples"] + 16), 9, 0, steps)) == 16
    parts: list[StreamRows] = [StreamRows(range_rows, lambda block: None, 3, "", {}) for _ in range(num_parts)]
    rows = MixedStreams(parts, [1.0] * num_parts) if num_parts > 1 else parts[0]
    rows.plan(0, steps, 99, anchor)
    rows.anchor(state["samples"] + 99)
    saved = state["recipe"]
    date.fromisoformat(saved.get("tokenizer", {}).get("template_date") or "2024-01-02")
    assert isinstance(saved.get("model", {}).get("revision") or "", str)


def range_rows(block: int) -> Any:
    return SimpleNamespace(sequence_length=4, fingerprint="")


@pytest.mark.parametrize("anchor", STREAMED)
@pytest.mark.parametrize("stopping", STOPPING)
def test_what_a_state_says_is_refused_at_reading_or_serves(stopping, anchor, run):
    """Every leaf that a start reads, of every other kind: what the reader takes, no later part of a start refuses."""
    folder = run / "checkpoints" / "step_00000002"
    whole = read_state(folder) | {"stopping": stopping, "anchor": anchor}
    whole["recipe"]["tokenizer"]["template_date"] = "2024-07-26"
    whole["recipe"]["model"]["revision"] = "main"
    sources = len(anchor.get("sources", ()))
    whole["recipe"]["data"]["mixture"] = [{"path": "a", "weight": 1.0}] * sources or None
    own = {key: whole[key] for key in whole.keys() - {"model", "versions", "generators", "recipe"}}
    paths = [*places(own, 3)]
    paths += [("recipe", *path) for path in places(whole["recipe"], 2) if path[0] in ("tokenizer", "model")]
    cases = [whole, *(case for path in paths for case in changed(whole, path))]
    for added in ({"batch_size_from_x": 8}, {"batch_size_from_": 8}, {"batch_size_from_07": 8}, {"sources": [1]}):
        cases.append(whole | {"anchor": anchor | added})
    for places_of in ([], [{"block": 1}], [{"block": 0, "start": 0}], [{"block": 0, "start": 0}] * 3):
        cases.append(whole | {"anchor": {"sources": places_of, "batch_size_from_0": 8}})
    cases += [whole | {"anchor": {"block": 1}}, whole | {"anchor": {"batch_size_from_8": 8}}]
    cases.append(whole | {"stopping": {"metric": "eval_loss", "value": 1.0, "evaluations_since": 3}})
    recipe, num_taken = loader.load_recipe("recipe.yaml", ["evaluate.patience=3", "evaluate.every_steps=1"]), 0
    for case in cases:
        (folder / "state.json").write_text(json.dumps(case))
        if not state_problems(folder, whole):
            num_taken += 1
            go_on_with(case, recipe, max(sources, 1))
    assert 100 < num_taken < len(cases) - 100


@pytest.mark.parametrize("of", ["state.json", "manifest.json", "COMMITTED"])
@pytest.mark.parametrize("resume", ["auto", "step_00000002"])
def test_no_recipe_is_settled_by_a_state_that_is_not_what_was_written(resume, of, run):
    """One digit, with which the file is as good as before to any reader: of the rows, or of a hash."""
    file = run / "checkpoints" / "step_00000002" / of
    content = file.read_text()
    old = '"samples": 16' if of == "state.json" else content[content.index("sha256") + 10 :][:1]
    start = content.index(old, content.index("sha256") + 10 if "sha256" in content else 0)
    new = '"samples": 17' if of == "state.json" else "0" if old != "0" else "1"
    file.write_text(content[:start] + new + content[start + len(old) :])
    plan = SimpleNamespace(resume=resume if resume == "auto" else str(run / "checkpoints" / resume))
    context: Any = SimpleNamespace(plan=plan, run=SimpleNamespace(checkpoints=run / "checkpoints"))
    assert settle._saved(context).get("step") == (1 if resume == "auto" else None)


def test_a_damaged_checkpoint_is_not_exported(run, monkeypatch, capsys):
    chosen: list[str] = []
    monkeypatch.setattr(commands, "do", lambda work: chosen.append(work.arguments[1].name) or 0)
    for name, how in damages_of(run, "checkpoints/step_00000002/"):
        before = damaged(run / name, how)
        assert ends(["export", run, "--checkpoint", "latest"], capsys)[0] == 0
        assert chosen.pop() == "step_00000001", (name, how)
        (run / name).write_bytes(before)


MODEL_COMMANDS = {
    "generate": ["--prompt", "a", "--max_new_tokens", "1"],
    "evaluate": [],
    "export": ["--dtype", "bf16"],
}


@pytest.mark.parametrize("command", MODEL_COMMANDS)
def test_a_damaged_model_is_not_used(command, run, capsys):
    """Of a folder that this package wrote, the hashes show every damage."""
    cases = list(damages_of(run, "model/"))
    assert len({name for name, _ in cases}) >= 6
    for name, how in cases:
        before = damaged(run / name, how)
        if (run / name).exists() and (run / name).read_bytes() == before:
            continue
        code, output = (
            (0, "")
            if Path(name).name in ("README.md", "loss.svg", SUMS)
            else ends([command, run, *MODEL_COMMANDS[command]], capsys)
        )
        if output:
            assert code in (2, 4) and "model" in output, (name, how, output)
        (run / name).write_bytes(before)


@pytest.mark.parametrize("command", ["generate", "export"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_strangers_model_ends_in_a_message(how, command, run, capsys):
    """Without hashes, loading is what finds the damage; one bit may give another model."""
    (run / "model" / SUMS).unlink()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ):
        before = damaged(run / "model" / name, how)
        code, output = ends([command, run, *MODEL_COMMANDS[command]], capsys)
        if name == "model.safetensors" and how != "one bit":
            assert code in (2, 4), (how, output)
        assert (run / "model-bf16").exists() == (command == "export" and code == 0), (name, how)
        shutil.rmtree(run / "model-bf16", ignore_errors=True)
        (run / "model" / name).write_bytes(before)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_wrong_types_in_any_key_of_a_strangers_model(name, run, capsys):
    (run / "model" / SUMS).unlink()
    content = json.loads((run / "model" / name).read_text())
    for path in places(content, 1):
        for case in changed(content, path):
            (run / "model" / name).write_text(json.dumps(case))
            ends(["generate", run, *MODEL_COMMANDS["generate"]], capsys)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"])
def test_a_strangers_damaged_adapter_is_not_merged(name, adapted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(adapted.parent)
    folder, merged = Path(shutil.copytree(adapted, tmp_path / "adapter")), tmp_path / "merged"
    content = (folder / name).read_bytes()
    cases = {how: after for how, damage in DAMAGES.items() if (after := damage(content)) is not None}
    if name == "adapter_config.json":
        keys = ("peft_type", "base_model_name_or_path", "r", "target_modules")
        forged = [case for key in keys for case in changed(json.loads(content), (key,))]
        cases |= {f"forged {number}": json.dumps(case).encode() for number, case in enumerate(forged)}
    for how, case in cases.items():
        (folder / name).write_bytes(case)
        code, output = ends(["merge", folder, "--output", merged], capsys)
        assert code in (2, 4) or name != "adapter_model.safetensors" or how == "one bit", (how, output)
        assert merged.exists() == (code == 0), how
        shutil.rmtree(merged, ignore_errors=True)


@pytest.mark.parametrize("part", ["adapter", "base"])
def test_no_damaged_file_is_merged(part, adapted, tmp_path, capsys):
    """Of folders that this package wrote, the hashes show every damage."""
    base = Path(shutil.copytree(adapted.parent / "run" / "model", tmp_path / "base"))
    folder, merged = Path(shutil.copytree(adapted, tmp_path / "adapter")), tmp_path / "merged"
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    write_checksums(folder)
    damaged_folder = folder if part == "adapter" else base
    for name, how in damages_of(damaged_folder):
        if name in ("README.md", "loss.svg", SUMS):
            continue
        before = damaged(damaged_folder / name, how)
        code, output = ends(["merge", folder, "--output", merged], capsys)
        assert (code in (2, 4), merged.exists()) == (True, False), (name, how, output)
        (damaged_folder / name).write_bytes(before)
    assert ends(["merge", folder, "--output", merged], capsys)[0] == 0


def test_no_training_starts_from_a_damaged_model(origin, tmp_path):
    model = Path(shutil.copytree(origin / "run" / "model", tmp_path / "model"))
    (model / "model.safetensors").write_bytes(_flip((model / "model.safetensors").read_bytes()))
    keys = ["model.config=null", f"model.path={model}", "tokenizer.vocabulary_size=null"]
    command = [sys.executable, str(ROOT / "train.py"), "recipe.yaml", *keys, f"output_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=origin, capture_output=True, text=True, timeout=300)
    assert done.returncode == 4 and "model.safetensors: differs from what was written" in done.stderr, done.stderr
