"""Run under a launcher with train.py's arguments: a few steps under each strategy file of $STRATEGIES.

They are separated by commas. All are trained by one process tree, one after the other, from the same weights. Prints
one JSON line on rank 0, with how far the weights are from those of the safetensors file $REFERENCE.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from harness import relative_l2
from safetensors.torch import load_file

from samecurve.data.batches import StepBatches
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.optim.schedule import learning_rate
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    files = os.environ["STRATEGIES"].split(",")
    plans = [preflight.plan([*sys.argv[1:], "--strategy", each], os.environ) for each in files]
    accelerator = factory.build_accelerator(plans[0])  # these strategies differ in nothing that Accelerate sees
    task, found = registry.load_task(plans[0].recipe), {}
    for file, plan in zip(files, plans, strict=True):
        found[Path(file).stem] = trained(accelerator, plan, task)
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


def trained(accelerator, plan, task) -> dict:
    recipe = plan.recipe
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    batches = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, recipe.steps)
    results = [engine.step(each, learning_rate(recipe, step)) for step, each in enumerate(batches, start=1)]
    weights = dict(engine.parameters())  # collective; on rank 0 alone they are there
    description = engine.describe()
    return {
        "engine": description.engine,
        "stages": description.dims.pp,
        "accumulation": description.gradient_accumulation_steps,
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "weights": relative_l2(weights, load_file(os.environ["REFERENCE"])) if accelerator.is_main_process else None,
    }


if __name__ == "__main__":
    lifecycle.end_with(main)
