"""Run under a launcher with train.py's arguments: one step in which each read of a tensor's value is noted.

Prints one JSON line on rank 0: the engine, and the place, kind and stack of each read. With PLANT_A_READ in the
environment the task's loss reads itself.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from reads import Reads

from samecurve.data.batches import StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    step_loss = task.step_loss

    def planted(*args: Any, **targets: Any) -> Any:
        loss, statistics = step_loss(*args, **targets)
        loss.item()
        return loss, statistics

    if "PLANT_A_READ" in os.environ:
        task.step_loss, task.by_token = planted, False  # so that the whole logits come to the task
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens, task.head)
    engine = factory.build(accelerator, plan, skeleton, task)
    recipe = plan.recipe
    ahead = {"count": task.count, "start_sum": ControlGroup().start_sum}
    steps = iter(StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, 2, **ahead))
    engine.step(next(steps), 1e-3)  # a session's first step is compared with the recipe, which reads more
    micro_batches = next(steps)
    with Reads() as reads:
        result = engine.step(micro_batches, 1e-3)
    assert result.applied
    found = {"engine": engine.describe().engine, "num_micro_batches": len(micro_batches), "reads": reads.found}
    found["packed"] = any(batch.facts.packed for batch in micro_batches)
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    lifecycle.end_with(main)
