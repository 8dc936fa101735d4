"""Run under a launcher with train.py's arguments: losses and gradient norms of a few steps, once for each of $CASES.

$CASES: names of ERRORS, separated by commas; "none" is the code as it is. All are made and trained by one process tree,
one after the other, from the same weights. Prints one JSON line on rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from unittest import mock

from samecurve.data.batches import StepBatches
from samecurve.engines import factory, gradient_norm, scheduled_engine, tensor_parallel, torch_engine
from samecurve.engines.schedule_stages import LocalStages
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry

STEPS = 3
_trained = LocalStages.trained


def _nothing(*_args: object) -> None:
    """Stands for a call that was forgotten."""


def _one_copy(_parameter: object, mesh: object) -> int:
    return 1


def _all_counted(stages: LocalStages) -> tuple[list, list]:
    own, others = _trained(stages)
    return own + others, []


# What is replaced, by name of the error. An engine has imported some functions by name.
ERRORS = {
    "none": [],
    "gradients stay where PyTorch left them": [
        (torch_engine, "place_gradients", _nothing),
        (scheduled_engine, "place_gradients", _nothing),
    ],
    "each rank's copy counts": [
        (module, "num_copies", _one_copy) for module in (gradient_norm, torch_engine, scheduled_engine)
    ],
    "a tied weight counts on both stages": [(LocalStages, "trained", _all_counted)],
    "a norm's gradient is of the rank's tokens": [(tensor_parallel, "sum_gradients", _nothing)],
}


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.start(plan)
    task, found = registry.load_task(plan.recipe), {}
    for name in os.environ["CASES"].split(","):
        planted = [mock.patch.object(*error) for error in ERRORS[name]]
        for each in planted:
            each.start()
        found[name] = trained(accelerator, plan, task)
        for each in planted:
            each.stop()
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


def trained(accelerator, plan, task) -> dict:
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    steps = StepBatches(task.train, plan.recipe.seed, plan.recipe.batch, engine.shard, STEPS)
    results = [engine.step(micro_batches, 1e-3) for micro_batches in steps]
    return {
        "engine": engine.describe().engine,
        "loss": [result.loss for result in results],
        "norm": [result.grad_norm for result in results],
    }


if __name__ == "__main__":
    lifecycle.end_with(main)
