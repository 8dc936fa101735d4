"""Checkpoints of other libraries, made by these libraries, which `adopt` continues as they do themselves."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import foreign_loop
import pytest
import torch
from accelerate.state import AcceleratorState

from samecurve.data.batches import StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
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
        nothing = lambda *_: None  # noqa: E731
        watch = SimpleNamespace(phase=nothing, progress=nothing, local_progress=nothing)
        return Context(plan, factory.start(plan), run, watch, ControlGroup(), Progress(plan.recipe.steps, 1, False))

    def adopt(self, path: Path, *overrides: str) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        adoption.run(self.plan(*overrides), path)

    def go_on(self, *overrides: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Train the steps that are left, and return their losses and the last weights."""
        context, built, checkpoints = startup.prepare(self.context(*overrides))
        engine = factory.build(context.accelerator, context.plan, built.skeleton, built.task)
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
            foreign_loop.main(name, folder)
        return folders[name]

    return make


@pytest.mark.parametrize("name", ["trainer", "accelerate", "dcp"])
def test_continues_as_the_library_itself(here, made, capsys, name):
    folder = made(name)
    out = f"output_dir={folder / 'run'}"
    here.adopt(folder / "out", out)
    printed = capsys.readouterr().out
    assert "step 10: weights, exp_avg, exp_avg_sq" in printed and "optimizer." not in printed, printed
    losses, weights = here.go_on(out)
    expected = torch.load(folder / "continued.pt")
    assert losses == pytest.approx(expected["losses"], abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected["weights"][name], atol=1e-5, rtol=0)
