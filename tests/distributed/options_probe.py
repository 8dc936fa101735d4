"""Run under a launcher with train.py's arguments: losses and gradient norms of a few steps, once for each of $CASES.

$CASES: {name: {recipe key: value}}, JSON. All are made and trained by one process tree, one after the other, from the
same weights. Prints one JSON line on rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch._dynamo.utils import get_compilation_metrics
from transformers.models.llama.modeling_llama import LlamaMLP

from samecurve.config.schema import Recipe
from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.engines import factory
from samecurve.models.compilation import Recompilations
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry

STEPS = 3


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    found = {}
    for name, keys in json.loads(os.environ["CASES"]).items():
        recipe = Recipe.model_validate({**plan.recipe.model_dump(), **keys})
        found[name] = measured(accelerator, replace(plan, recipe=recipe), task)
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


@contextmanager
def calls(module_class) -> Iterator[list]:
    """Has one entry for each time that a module of this class was run, however often it was meant to be."""
    seen, forward = [], module_class.forward

    def noted(self, *args):
        seen.append(None)
        return forward(self, *args)

    module_class.forward = noted
    yield seen
    module_class.forward = forward


def measured(accelerator, plan, task) -> dict:
    torch._dynamo.reset()  # what an earlier case compiled may fit this one, too
    recipe, counter = plan.recipe, Recompilations(plan.recipe.compile != "off", print)
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    steps = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, STEPS)
    with nullcontext([]) if recipe.compile != "off" else calls(LlamaMLP) as counted:
        results = [engine.step(micro_batches, 1e-3) for micro_batches in steps]
    held_out = list(EvaluationBatches(task.validation, recipe.batch.micro_batch_size, engine.shard))
    evaluated = [engine.evaluate(held_out).loss for _ in range(2)]
    owner = next(name for name in ("model", "_engine", "_module") if hasattr(engine, name))  # one for each engine
    modules = getattr(engine, owner).modules()
    return {
        "engine": engine.describe().engine,
        "loss": [result.loss for result in results],
        "norm": [result.grad_norm for result in results],
        "eval_loss": evaluated,
        "fp8_modules": sum(type(module).__name__ == "Float8Linear" for module in modules),  # on this rank
        **{key: getattr(engine.describe(), key) for key in ("kernels", "loss_implementation")},
        "mlp_calls": len(counted),  # of layers on this rank
        # a compiled loss does not show that layers are
        "compiled": sum(entry.co_filename not in (None, registry.__file__) for entry in get_compilation_metrics()),
        **counter.record(STEPS),
    }


if __name__ == "__main__":
    lifecycle.end_with(main)
