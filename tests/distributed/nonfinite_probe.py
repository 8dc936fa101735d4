"""Run under a launcher with train.py's arguments: breaks a loss, then a gradient, looks at weights, goes on.

Prints one JSON line on rank 0: why each broken step was refused, whether weights and moments are bitwise what they
were, and loss and gradient norm of the good steps after it.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from samecurve.data.batches import StepBatches
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


class BrokenGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    intact, broken = task.loss, {"by": None}

    def loss(logits, labels):
        value = intact(logits, labels)
        # only one rank's rows are broken; every rank has to stop
        if broken["by"] == "loss" and accelerator.process_index == accelerator.num_processes - 1:
            return value * float("nan")
        return BrokenGradient.apply(value) if broken["by"] == "gradient" else value

    task.loss = loss
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    batches = iter(StepBatches(task.train, plan.recipe.seed, plan.recipe.batch, engine.shard, 7))
    engine.step(next(batches), 1e-3)
    found = {"engine": engine.describe().engine, "after": []}
    for by in ("loss", "gradient"):
        broken["by"] = by
        before = kept(engine)
        result = engine.step(next(batches), 1e-3)
        broken["by"] = None
        assert result.refused and not result.applied, f"rank {accelerator.process_index} went on with a broken {by}"
        after = kept(engine)
        found[by] = result.refused
        found[f"untouched by {by}"] = all(torch.equal(before[name], after[name]) for name in before)
        for _ in range(2):
            result = engine.step(next(batches), 1e-3)
            assert result.applied and not result.refused
            found["after"].append((result.loss, result.grad_norm))
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


def kept(engine) -> dict:
    """Weights and moments that this rank has."""
    return {(held.name, kind): tensor.clone() for held, kind, tensor in engine.state.visit()}


if __name__ == "__main__":
    lifecycle.end_with(main)
