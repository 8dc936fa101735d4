"""Run under a launcher with train.py's arguments, after a file: what forward passes see of a recurrence's weights.

Rank 0 writes losses, and of each A_log, dt_bias and D the largest difference between the engine's fp32 weight before a
step and what the module computes with in that step; the last one is that of an evaluation after loading a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from samecurve.checkpoint.manager import Checkpoints, TrainProgress
from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.run.metadata import resume_identity
from samecurve.run.run_directory import RunDirectory
from samecurve.specs.optimizers import RECURRENT
from samecurve.strategy import preflight
from samecurve.tasks import registry

STEPS = 4


def main() -> None:
    plan = preflight.plan(sys.argv[2:], os.environ)
    recipe, accelerator, world = plan.recipe, factory.build_accelerator(plan), ControlGroup()
    task = registry.load_task(recipe)
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    seen: dict[str, torch.Tensor] = {}
    module = getattr(engine.model, "module", engine.model)
    for path, mixer in module.named_modules():
        for own in RECURRENT & mixer._parameters.keys():
            # in the mixer's own forward pass, when its first layer begins
            mixer.in_proj.register_forward_pre_hook(
                lambda *_, name=f"{path}.{own}", own=own, mixer=mixer: seen.update(
                    {name: getattr(mixer, own).detach().clone()}
                )
            )

    def differences(run) -> float:
        before = {
            name: full if full is None else full.clone()
            for name, full in engine.parameters()
            if name.rpartition(".")[2] in RECURRENT
        }
        run()
        assert seen.keys() == before.keys()
        pairs = ((seen[name].cpu(), full) for name, full in before.items() if full is not None)
        return max((float((own.double() - full).abs().max()) for own, full in pairs), default=0.0)

    losses, found = [], []
    batches = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, num_steps=STEPS)
    run = RunDirectory(recipe.output_dir, is_main=world.is_main)
    checkpoints = Checkpoints(
        run, recipe, resume_identity(plan, skeleton, task), world, accelerator.print, background=False
    )
    for step, micro_batches in enumerate(batches, start=1):
        found.append(differences(lambda rows=micro_batches: losses.append(engine.step(rows, 1e-3).loss)))
        if step == STEPS // 2:
            checkpoints.save(engine, TrainProgress(step, step, batches.samples), wait=True)
    checkpoints.load(run.path / "checkpoints" / f"step_{STEPS // 2:08d}", engine)
    held_out = EvaluationBatches(task.validation, recipe.batch.micro_batch_size, engine.shard)
    found.append(differences(lambda: engine.evaluate(held_out)))
    last = {name: full for name, full in engine.parameters() if name.rpartition(".")[2] in RECURRENT}
    if accelerator.is_main_process:
        weights = {name: full.tolist() for name, full in last.items()}
        result = {"engine": engine.describe().engine, "losses": losses, "differences": found, "weights": weights}
        Path(sys.argv[1]).write_text(json.dumps(result))
    accelerator.end_training()


if __name__ == "__main__":
    lifecycle.end_with(main)
