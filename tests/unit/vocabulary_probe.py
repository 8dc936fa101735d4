"""Run with train.py's arguments: bytes by which this process's peak grows in a step and an evaluation.

The model has a vocabulary of VOCABULARY, whatever the tokenizer; its weights, gradients and moments are there before.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.engines import factory
from samecurve.metrics.meter import peak_memory_bytes
from samecurve.models.skeleton import build_skeleton
from samecurve.strategy import preflight
from samecurve.tasks import registry

VOCABULARY = 128_256


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator, recipe = factory.build_accelerator(plan), plan.recipe
    task = registry.load_task(recipe)
    skeleton = build_skeleton(recipe, VOCABULARY, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optimizer.step()
    engine.first_step.is_over = True  # the engine's first step is the optimizer's second
    before = peak_memory_bytes(engine.device)
    (rows,) = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, 1)
    result = engine.step(rows, 1e-3)
    held_out = list(EvaluationBatches(task.validation, recipe.batch.micro_batch_size, engine.shard))
    engine.evaluate(held_out[:1])
    assert result.applied
    growth = peak_memory_bytes(engine.device) - before
    print("FOUND " + json.dumps({"growth": growth, "tokens": result.tokens, "loss": result.loss}))


if __name__ == "__main__":
    main()
