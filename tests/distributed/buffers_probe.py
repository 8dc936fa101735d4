"""Run under a launcher with train.py's arguments: the dtypes of all buffers, and the losses of two steps.

Prints FOUND and, as JSON, the dtypes of floating-point buffers by name, of the student and of the teacher.
"""

from __future__ import annotations

import json
import os
import sys

from samecurve.data.batches import StepBatches
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    batches = StepBatches(task.train, plan.recipe.seed, plan.recipe.batch, engine.shard, num_steps=2)
    losses = [engine.step(micro_batches, 1e-3).loss for micro_batches in batches]
    models = {"student": engine.model, "teacher": engine.forward.teacher}
    dtypes = {
        f"{role} {name.removeprefix('module.')}": str(buffer.dtype)
        for role, model in models.items()
        if model is not None
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point()
    }
    accelerator.print("FOUND", json.dumps({"engine": engine.describe().engine, "dtypes": dtypes, "losses": losses}))
    accelerator.end_training()


if __name__ == "__main__":
    lifecycle.end_with(main)
