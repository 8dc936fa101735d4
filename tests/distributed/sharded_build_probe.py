"""Run under a launcher with train.py's arguments: how far this process's peak memory grows while the engine is built.

Prints, from rank 0, the largest growth of any rank in units of the model's fp32 weights.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from samecurve.engines import factory
from samecurve.metrics.meter import peak_memory_bytes
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    weights = 4 * sum(parameter.numel() for parameter in skeleton.parameters())
    before = peak_memory_bytes(accelerator.device)
    engine = factory.build(accelerator, plan, skeleton, task)
    growth = torch.tensor([(peak_memory_bytes(accelerator.device) - before) / weights])
    largest = accelerator.gather(growth).max().item()
    facts = {"engine": engine.describe().engine, "weights_mib": weights / 2**20, "growth": largest}
    accelerator.print("FOUND " + json.dumps(facts))
    accelerator.end_training()


if __name__ == "__main__":
    lifecycle.end_with(main)
