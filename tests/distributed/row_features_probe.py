"""Run under a launcher with train.py's arguments: what an engine finds of rows, beside what a whole model finds.

Prints one JSON line on rank 0. The task is causal; a row's features are its log-likelihood and its number of trained
tokens, and its loss is weighted with its first token.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import torch
from torch.nn import functional

from samecurve.data.batches import EvaluationBatches, StepBatches
from samecurve.engines import factory
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.models import weights
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    recipe, task = plan.recipe, registry.load_task(plan.recipe)
    task.features, task.statistics, task.loss = features, statistics, loss
    task.by_token = False  # what is asked here is of whole rows, which the chunked head does not see
    task.count = lambda labels, weight: int((labels != IGNORE_INDEX).sum())
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    held_out = weighted(EvaluationBatches(task.validation, recipe.batch.micro_batch_size, engine.shard))
    found, evaluated = engine.features(held_out), engine.evaluate(held_out)
    step = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, 1)
    trained = engine.step(weighted(step.at(0)), 1e-3)
    whole = step.batch.model_copy(update={"micro_batch_size": 8})
    alone = expected(skeleton, recipe, weighted(StepBatches(task.train, recipe.seed, whole, (0, 1), 1).at(0)))
    together = expected(skeleton, recipe, weighted(EvaluationBatches(task.validation, 8, (0, 1))))
    rows = len(task.validation)
    result = {
        "engine": engine.describe().engine,
        "rows": rows,
        "filling": found[rows:].tolist(),
        "features": float((found[:rows] - together["features"][:rows]).abs().max()),
        "equal": len({tuple(seen) for seen in _everywhere(found)}) == 1,
        "statistics": [evaluated.statistics, together["statistics"]],
        "loss": [trained.loss, alone["loss"]],
        "eval_loss": [evaluated.loss, together["loss"]],
    }
    accelerator.print("FOUND " + json.dumps(result))
    accelerator.end_training()


def weighted(batches):
    return [replace(b, targets=b.targets | {"weight": b.inputs["input_ids"][:, 0]}) for b in batches]


def likelihoods(logits, labels):
    token = functional.cross_entropy(logits.float().mT, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return -token.sum(dim=1)


def features(logits, labels, weight):
    return torch.stack([likelihoods(logits, labels), (labels != IGNORE_INDEX).sum(dim=1)], dim=1)


def statistics(logits, labels, weight):
    return torch.stack([(logits.argmax(dim=-1) == labels).sum(), weight[(labels != IGNORE_INDEX).any(dim=1)].sum()])


def loss(logits, labels, weight):
    return -(weight * likelihoods(logits, labels)).sum()


def expected(skeleton, recipe, batches) -> dict:
    whole = construct(type(skeleton), skeleton.config, torch.device("cpu")).eval()
    tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
    with torch.no_grad():
        weights.load_weights(skeleton, recipe, lambda name, tensor: tensors[name].copy_(tensor))
        outputs = [(whole(**batch.inputs).logits, batch.targets) for batch in batches]
        found = {"features": torch.cat([features(logits, **targets) for logits, targets in outputs])}
        found["statistics"] = sum(statistics(logits, **targets) for logits, targets in outputs).tolist()
        total = sum(loss(logits, **targets) for logits, targets in outputs)
    return found | {"loss": float(total / sum((targets["labels"] != IGNORE_INDEX).sum() for _, targets in outputs))}


def _everywhere(found) -> list[list[float]]:
    if not torch.distributed.is_initialized():
        return [found.flatten().tolist()]
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, found.flatten().tolist())
    return gathered


if __name__ == "__main__":
    lifecycle.end_with(main)
