"""Run under a launcher with train.py's arguments: $CASES of memory and precision, then the training itself.

$CASES: {name: {recipe key: value}}, JSON. Prints, from rank 0, for each case the bytes that the gradients of a step's
first micro-batch left behind and what was said of them; and for each rank after which steps it collected garbage.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import replace

import torch
from live_tensors import live_bytes
from torch.distributed.tensor import DTensor

import train
from samecurve.config.schema import Recipe
from samecurve.data.batches import StepBatches
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry

STEPS = 3


def least_live_bytes() -> int:
    """The least of some looks, because gloo's threads let go a moment later."""
    looks = []
    for _ in range(4):
        looks.append(live_bytes())
        time.sleep(0.05)
    return min(looks)


def measured(accelerator, plan, task) -> dict:
    recipe = plan.recipe
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    steps = list(StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, STEPS))
    each, live, results = engine.forward.with_contexts, [], []

    def noted(micro_batches, tokens):
        for batch, context, is_last in each(micro_batches, tokens):
            yield batch, context, is_last
            if not is_last:  # and it has been through its backward pass
                live.append(least_live_bytes())

    engine.forward.with_contexts = noted
    for micro_batches in steps:
        live.append(least_live_bytes())
        results.append(engine.step(micro_batches, 1e-3))
    before, after_the_first = live[-2:]  # of the last step: everything else is there by then
    return {
        "held": after_the_first - before,
        "said": engine.describe().whole_gradient_bytes,
        "said_of_all": engine.memory_usage().gradients,
        "loss": [result.loss for result in results],
        "norm": [result.grad_norm for result in results],
    }


def main() -> None:
    cases, found = json.loads(os.environ["CASES"]), {}
    if cases:
        plan = preflight.plan(sys.argv[1:], os.environ)
        accelerator = factory.build_accelerator(plan)
        task = registry.load_task(plan.recipe)
        for name, keys in cases.items():
            recipe = Recipe.model_validate({**plan.recipe.model_dump(), **keys})
            found[name] = measured(accelerator, replace(plan, recipe=recipe), task)
        factory.build_accelerator = lambda plan: accelerator
    train.train = watched(train.train, found)
    train.main()


def watched(train_loop, cases: dict):
    """The loop with a note of each collection: after which step, whether Python began it by itself, and the bytes of
    tensors that had to wait for it."""

    def loop(session) -> None:
        seen = []

        def note(phase: str, info: dict) -> None:
            if phase == "stop":
                tensors = [each for each in gc.garbage if issubclass(type(each), torch.Tensor)]
                held = sum(each.untyped_storage().nbytes() for each in tensors if not isinstance(each, DTensor))
                seen.append((session.context.watch.watchdog.step, gc.isenabled(), held))
                gc.garbage.clear()

        gc.callbacks.append(note)
        gc.set_debug(gc.DEBUG_SAVEALL)
        train_loop(session)
        gc.set_debug(0)
        gc.callbacks.remove(note)
        of_all = session.context.world.conclude(seen, list)
        session.context.accelerator.print("FOUND " + json.dumps([cases, of_all]))

    return loop


if __name__ == "__main__":
    lifecycle.end_with(main)
