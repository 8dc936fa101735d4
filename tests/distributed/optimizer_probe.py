"""Run under a launcher with train.py's arguments and a JSON file first: several optimizers in one start, one by one.

{"optimizers": {name: overrides}, "folder": where the runs go, "origin": the folder of another start's, or null,
"results": file}. Each trains STEPS steps and saves after SAVED; with an origin it then loads that one's checkpoint and
goes on from it. Rank 0 writes a line for each: losses and norms, those after loading, and what came back changed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from harness import once
from pairs_probe import differs
from test_resume import whole

from samecurve.checkpoint.manager import Checkpoints, TrainProgress
from samecurve.data.batches import StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.engines.memory_usage import _local
from samecurve.models.skeleton import build_skeleton
from samecurve.optim.schedule import learning_rate
from samecurve.run import lifecycle
from samecurve.run.metadata import resume_identity
from samecurve.run.run_directory import RunDirectory
from samecurve.strategy import preflight
from samecurve.tasks import registry

STEPS, SAVED = 8, 4


def main() -> None:
    wanted = json.loads(Path(sys.argv[1]).read_text())
    accelerator = task = skeleton = None
    for name, overrides in wanted["optimizers"].items():
        plan = preflight.plan(once([*sys.argv[2:], *overrides, f"output_dir={wanted['folder']}/{name}"]), os.environ)
        if accelerator is None:
            accelerator = factory.build_accelerator(plan)
            task = registry.load_task(plan.recipe)
            skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
        found = one(plan, accelerator, task, skeleton, wanted["origin"] and Path(wanted["origin"]) / name)
        if accelerator.is_main_process:
            with open(wanted["results"], "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"optimizer": name, **found}) + "\n")
    accelerator.end_training()


def one(plan, accelerator, task, skeleton, origin: Path | None) -> dict:
    recipe, world = plan.recipe, ControlGroup()
    run = RunDirectory(recipe.output_dir, is_main=world.is_main)
    checkpoints = Checkpoints(
        run, recipe, resume_identity(plan, skeleton, task), world, accelerator.print, background=False
    )
    engine = factory.build(accelerator, plan, skeleton, task)
    module = getattr(engine, "model", None) or engine._module
    frozen = [weight for weight in module.parameters() if not weight.requires_grad]
    before = [_local(weight).clone() for weight in frozen]

    def train(start: int, save_after: int = 0) -> list[tuple[float, float]]:
        batches = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, STEPS, start)
        results = []
        for step, micro_batches in enumerate(batches, start=start + 1):
            results.append(engine.step(micro_batches, learning_rate(recipe, step)))
            if step == save_after:
                checkpoints.save(engine, TrainProgress(step, step, batches.samples), wait=True)
        return [(result.loss, result.grad_norm) for result in results]

    described = engine.describe()
    found = {"engine": described.engine, "dtypes": [described.weight_dtype, described.reduce_dtype]}
    found |= {"results": train(0, save_after=SAVED), "unequal": []}
    moved = sum(not torch.equal(_local(weight), old) for weight, old in zip(frozen, before, strict=True))
    kept = moved, sum(weight.grad is not None for weight in frozen), engine.memory_usage().optimizer
    found |= {"kept": world.conclude(kept, lambda every: [sum(values) for values in zip(*every, strict=True)])}
    if recipe.optimizer.name == "adamw_bf16":
        # without a gradient nothing is summed, so the weights and their random rounding are the same to the last bit
        position = checkpoints.load((origin or run.path) / "checkpoints" / f"step_{SAVED:08d}", engine)
        for parameter in engine.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        engine.optimizer.step()
        checkpoints.save(engine, replace(position, step=STEPS), wait=True)
    if origin:
        folder = origin / "checkpoints" / f"step_{SAVED:08d}"
        position = checkpoints.load(folder, engine)
        stored = whole(folder)
        seen = list(engine.state.visit())
        assert seen and position.step == SAVED
        unequal = {
            f"{kind}/{held.name}" for held, kind, tensor in engine.state.visit() if differs(stored, held, kind, tensor)
        }
        found |= {"unequal": world.conclude(unequal, lambda every: sorted(set().union(*every))), "after": train(SAVED)}
    return found


if __name__ == "__main__":
    lifecycle.end_with(main)
