"""Run under a launcher with train.py's arguments: breaks a loss, then a gradient, and looks at the weights.

Prints one JSON line on rank 0: the message of each NumericError and whether the weights are bitwise what they were.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from samecurve import engines, model, outcome, tasks
from samecurve.data import StepBatches
from samecurve.errors import NumericError


class BrokenGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def main() -> None:
    plan = engines.plan(sys.argv[1:], os.environ)
    accelerator = engines.start(plan)
    task = tasks.load(plan.recipe)
    intact, broken = task.loss, {"by": None}

    def loss(logits, labels):
        value = intact(logits, labels)
        # only one rank's rows are broken; every rank has to stop
        if broken["by"] == "loss" and accelerator.process_index == accelerator.num_processes - 1:
            return value * float("nan")
        return BrokenGradient.apply(value) if broken["by"] == "gradient" else value

    task.loss = loss
    skeleton = model.skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    engine = engines.build(accelerator, plan, skeleton, task)
    batches = iter(StepBatches(task.train, plan.recipe.seed, plan.recipe.batch, engine.shard, 3))
    engine.step(next(batches), 1e-3)
    found = {"engine": engine.describe()["engine"]}
    for broken["by"] in ("loss", "gradient"):
        before = weights(engine)
        try:
            engine.step(next(batches), 1e-3)
            message = None
        except NumericError as error:
            message = str(error)
        assert message is not None, f"rank {accelerator.process_index} went on with a broken {broken['by']}"
        after = weights(engine)
        found[broken["by"]] = message
        found[f"untouched by {broken['by']}"] = all(torch.equal(before[name], after[name]) for name in before)
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


def weights(engine) -> dict:
    return {name: tensor for name, tensor in engine.parameters() if tensor is not None}


if __name__ == "__main__":
    outcome.leave(outcome.exit_code(main))
