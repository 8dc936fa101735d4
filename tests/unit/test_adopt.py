"""Checkpoints of other libraries, made by these libraries, which `adopt` continues as they do themselves."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import foreign_loop
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from samecurve.checkpoint.foreign_formats import locate
from samecurve.checkpoint.resume import read_state
from samecurve.cli import commands
from samecurve.data.batches import StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.distributed.network import free_port
from samecurve.engines import factory
from samecurve.errors import CheckpointError, ConfigurationError, SamecurveError
from samecurve.metrics.console import Progress
from samecurve.optim.schedule import learning_rate
from samecurve.run.run_directory import RunDirectory
from samecurve.strategy import preflight
from samecurve.training import adoption, startup
from samecurve.training.session import Context

RECIPE = {
    "steps": foreign_loop.STEPS,
    "precision": "fp32",
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "tie_word_embeddings": True,
        }
    },
    "tokenizer": {"vocabulary_size": 300},
    "data": {"packing": False},
    "batch": {"global_batch_size": 8, "micro_batch_size": 8, "sequence_length": 32},
    "optimizer": {
        "learning_rate": foreign_loop.RATE,
        "betas": [0.9, 0.999],
        "weight_decay": foreign_loop.DECAY,
        "max_grad_norm": foreign_loop.NORM,
    },
    "schedule": {"name": "linear", "warmup_steps": foreign_loop.WARMUP, "min_lr_ratio": 0.0, "delay_steps": 1},
}


@dataclass(frozen=True)
class Here:
    """A recipe, and this process as it trains it."""

    folder: Path
    recipe: Path

    def plan(self, *overrides: str):
        return preflight.plan([str(self.recipe), *overrides], {})

    def context(self, *overrides: str) -> Context:
        AcceleratorState._reset_state(reset_partial_state=True)
        plan = self.plan(*overrides)
        run = RunDirectory(plan.recipe.output_dir, resume="auto")
        return Context(
            plan, factory.build_accelerator(plan), run, adoption.UNWATCHED, ControlGroup(), Progress(1, 1, False)
        )

    def adopt(self, path: Path, *overrides: str) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        adoption.run(self.plan(*overrides), path)

    def go_on(self, *overrides: str) -> tuple[list[float], dict[str, torch.Tensor | None]]:
        """Train the steps that are left, and return their losses and the last weights."""
        context, built, checkpoints = startup.prepare(self.context(*overrides))
        engine = factory.build(context.accelerator, context.plan, built.skeleton, built.task)
        assert checkpoints.resumed_from
        start = checkpoints.load(checkpoints.resumed_from, engine)
        recipe, task = context.recipe, built.task
        where = (recipe.steps, start.step, start.samples, start.anchor)
        losses = []
        for number, rows in enumerate(
            StepBatches(task.train, recipe.seed, recipe.batch, (0, 1), *where, 0, task.count)
        ):
            losses.append(engine.step(rows, learning_rate(recipe, start.updates + number + 1)).loss)
        context.run.close()
        return losses, dict(engine.parameters())


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Here:
    folder = tmp_path_factory.mktemp("adopt")
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    lines = [" ".join(words[(row * step) % 8] for step in range(1, 3 + row % 9)) for row in range(1, 400)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data = {**RECIPE["data"], "path": str(folder / "data.jsonl"), "cache_dir": str(folder / "cache")}
    recipe = folder / "recipe.json"
    recipe.write_text(json.dumps({**RECIPE, "data": data, "output_dir": str(folder / "rows")}))
    made = Here(folder, recipe)
    context, built, _ = startup.prepare(made.context())
    batches = StepBatches(built.task.train, context.recipe.seed, context.recipe.batch, (0, 1), foreign_loop.STEPS)
    steps = []
    for step in range(foreign_loop.STEPS):
        (rows,) = batches.at(step)
        inputs = rows.inputs
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        steps.append({"input_ids": inputs["input_ids"], "attention_mask": mask, "shift_labels": rows.targets["labels"]})
    torch.save(steps, folder / "rows.pt")
    built.skeleton.config.save_pretrained(folder)
    context.run.close()
    return made


def launch(kind: str, folder: Path, world: int) -> None:
    options = ["--nproc_per_node", str(world), "--master_port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *options, foreign_loop.__file__, kind, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (folder / "continued.pt").is_file(), done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(here, tmp_path_factory):
    """Return the folder in which a format's loop has run, made once."""
    folders: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in folders:
            folder = folders[name] = tmp_path_factory.mktemp(name)
            for file in ("rows.pt", "config.json"):
                (folder / file).write_bytes((here.folder / file).read_bytes())
            AcceleratorState._reset_state(reset_partial_state=True)
            kind, _, world = name.partition("_on_")
            if world:
                launch(kind, folder, int(world))
            else:
                foreign_loop.main(kind, folder)
        return folders[name]

    return make


SHARDED = ["accelerate", "trainer"]
SHARDED += [f"{library}zero{stage}" for library in ("", "accelerate_", "trainer_") for stage in (1, 2, 3)]
SHARDED += ["fsdp_full", "fsdp_sharded", "trainer_fsdp_full", "trainer_fsdp_sharded", "trainer_fsdp1_sharded"]
LONG = [pytest.param(f"{name}_on_2", marks=pytest.mark.full) for name in SHARDED]


@pytest.mark.parametrize("name", ["trainer", "accelerate", "dcp", "accelerate_zero2_on_1", *LONG])
def test_continues_as_the_library_itself(here, made, capsys, name):
    folder = made(name)
    out = f"output_dir={folder / 'run'}"
    here.adopt(folder / "out", out)
    printed = capsys.readouterr().out
    assert "step 10: weights, exp_avg, exp_avg_sq" in printed and "optimizer." not in printed, printed
    assert_continues(folder, here.go_on(out))


def assert_continues(folder: Path, after: tuple[list[float], Mapping[str, torch.Tensor | None]]) -> None:
    losses, weights = after
    expected = torch.load(folder / "continued.pt")
    assert losses == pytest.approx(expected["losses"], abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected["weights"][name], atol=1e-5, rtol=0)


def test_newest_checkpoint_is_taken(tmp_path):
    for name in ("checkpoints/checkpoint_9", "checkpoints/checkpoint_10", "checkpoints/checkpoint_11", "logs_12"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("checkpoint_9", "checkpoint_10"):
        (tmp_path / "checkpoints" / name / "trainer_state.json").touch()
    assert locate(tmp_path) == ("transformers.Trainer", tmp_path / "checkpoints" / "checkpoint_10")
    (tmp_path / "epoch_2").mkdir()
    (tmp_path / "epoch_2" / "trainer_state.json").touch()
    with pytest.raises(ConfigurationError, match=r"numbers of checkpoint_, epoch_ cannot be compared"):
        locate(tmp_path)


@pytest.mark.parametrize("name", ["accelerate", "dcp"])
def test_exported_checkpoint_continues_in_library(here, made, name):
    folder, run = made("dcp"), here.folder / f"for_{name}"
    here.adopt(folder / "out", f"output_dir={run}")
    (run / "run.json").write_text("{}")  # as if train.py had begun
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not commands.main(["export", str(run), "--format", name])
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_continues(folder, foreign_loop.read_back(name, folder, run / f"step_00000010-{name}"))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/adopt-ran-code",)


def harm_optimizer(folder: Path) -> None:
    torch.save({"state": Evil(), "param_groups": []}, folder / "optimizer.pt")


def number_groups(folder: Path) -> None:
    torch.save({"state": {0: {}}, "param_groups": [7]}, folder / "optimizer.pt")


def harm_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))


def merge_groups(folder: Path) -> None:
    content = torch.load(folder / "optimizer.pt")
    first, second = content["param_groups"]
    content["param_groups"] = [first | {"params": first["params"][::-1] + second["params"]}]
    torch.save(content, folder / "optimizer.pt")


def move_updates(folder: Path) -> None:
    content = torch.load(folder / "optimizer.pt")
    content["state"][0]["step"] += 1
    torch.save(content, folder / "optimizer.pt")


def rename_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.9.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def spoil_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "name, harm, expected",
    [
        ("trainer", harm_optimizer, "optimizer.pt: refused, as reading it would run code"),
        ("dcp", harm_metadata, ".metadata: refused, as reading it would run code (posix.mkdir)"),
        ("trainer", number_groups, "not as transformers.Trainer writes it (TypeError"),
        ("trainer", merge_groups, "no known order of the parameters fits"),
        ("trainer", move_updates, "updated some parameters more often than others (step counters 10, 11)"),
        ("trainer", rename_weight, "model.layers.1.mlp.up_proj.weight"),
        ("accelerate", rename_weight, "model.layers.1.mlp.up_proj.weight: only in the model"),
        ("accelerate", spoil_weight, "model.norm.weight: weight has values that are not finite"),
    ],
)
def test_unusable_checkpoint_is_refused(here, made, tmp_path, name, harm, expected):
    folder = tmp_path / "given-10"
    shutil.copytree(locate(made(name) / "out")[1], folder)
    harm(folder)
    with pytest.raises(CheckpointError) as refusal:
        here.adopt(folder, f"output_dir={tmp_path / 'run'}")
    assert str(folder) in str(refusal.value) and expected in str(refusal.value)
    assert not Path("/tmp/adopt-ran-code").exists() and not (tmp_path / "run" / "checkpoints").exists()


def test_missing_moments_and_other_settings_are_said(here, made, tmp_path, capsys):
    folder = tmp_path / "checkpoint-10"
    shutil.copytree(made("trainer") / "out" / "checkpoint-10", folder)
    out = f"output_dir={tmp_path / 'run'}"
    changed = ("optimizer.betas=[0.9,0.95]", "optimizer.weight_decay=0.5", "optimizer.epsilon=1e-6")
    here.adopt(folder, out, *changed, "schedule.delay_steps=0")
    printed = capsys.readouterr().out
    assert "optimizer.betas: (0.9, 0.95) in the recipe; the checkpoint has optimizer.betas=[0.9,0.999]" in printed
    decay = foreign_loop.DECAY
    assert f"optimizer.weight_decay: 0.5 in the recipe; the checkpoint has optimizer.weight_decay={decay}" in printed
    assert "optimizer.epsilon: 1e-06 in the recipe; the checkpoint has optimizer.epsilon=1e-08" in printed
    assert "learning rate of the next step: 0.0018 by the recipe, 0.002 in the checkpoint" in printed
    (folder / "optimizer.pt").unlink()
    here.adopt(folder, f"output_dir={tmp_path / 'other'}")
    assert "step 10: weights are in" in (printed := capsys.readouterr().out)
    assert "no moments of AdamW: the optimizer and the schedule of its learning rate begin anew" in printed
    saved = read_state(tmp_path / "other" / "checkpoints" / "step_00000010")
    assert (saved["updates"], saved["samples"]) == (0, 80)


@pytest.mark.parametrize(
    "overrides, expected",
    [(("steps=10",), "steps: 10, but"), (("output_dir={run}",), "holds checkpoints of an earlier run")],
)
def test_recipe_without_room_is_refused(here, made, tmp_path, overrides, expected):
    run = tmp_path / "run"
    here.adopt(made("dcp") / "out", f"output_dir={run}")
    given = [override.format(run=run) for override in (f"output_dir={tmp_path / 'new'}", *overrides)]
    with pytest.raises(SamecurveError, match=expected):
        here.adopt(made("dcp") / "out", *given)


@pytest.mark.full
def test_train_py_resumes_under_zero3(here, made, tmp_path):
    folder, root = made("trainer"), Path(adoption.__file__).parents[2]
    given = [str(here.recipe), f"output_dir={tmp_path / 'run'}", "logging.every_steps=1", "export.verify=off"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    strategy = ["--strategy", "configs/zero3.yaml"]
    for command in (["-m", "samecurve", "adopt", str(folder / "out")], [*launcher, "train.py", *strategy]):
        done = subprocess.run(
            [sys.executable, *command, *given], cwd=root, env=environment, capture_output=True, text=True, timeout=300
        )
        assert not done.returncode, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses == pytest.approx(torch.load(folder / "continued.pt")["losses"], abs=1e-5)
