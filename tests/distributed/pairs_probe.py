"""Run under a launcher with train.py's arguments and a JSON file first, {"sources": {name: folder}, "steps": N,
"results": file}.

One after the other, each source's checkpoint is loaded and trained on from for N steps. Rank 0 writes a line for each:
whether all ranks hold its values bit for bit (read here with safetensors' own reader), then the losses and norms of the
next steps.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path

import torch
from test_resume import whole

from samecurve.checkpoint.manager import Checkpoints
from samecurve.data.batches import StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.optim.schedule import learning_rate
from samecurve.run import lifecycle
from samecurve.run.metadata import resume_identity
from samecurve.run.run_directory import RunDirectory
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    wanted = json.loads(Path(sys.argv[1]).read_text())
    plan = preflight.plan(sys.argv[2:], os.environ)
    recipe = plan.recipe
    run = RunDirectory(recipe.output_dir, is_main=os.environ.get("RANK", "0") == "0")
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(recipe)
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    world = ControlGroup()
    checkpoints = Checkpoints(run, recipe, resume_identity(plan, skeleton, task), world, accelerator.print)
    engine = factory.build(accelerator, plan, skeleton, task)
    for name, folder in wanted["sources"].items():
        position = checkpoints.load(Path(folder), engine)
        stored = whole(Path(folder))
        unequal = {
            f"{kind}/{held.name}" for held, kind, tensor in engine.state.visit() if differs(stored, held, kind, tensor)
        }
        batches = StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, recipe.steps, position.step)
        results = [
            engine.step(micro_batches, learning_rate(recipe, step))
            for step, micro_batches in enumerate(islice(batches, wanted["steps"]), start=position.step + 1)
        ]
        found = {"source": name, "unequal": world.conclude(unequal, lambda every: sorted(set().union(*every)))}
        found |= {"engine": engine.describe().engine, "world_size": world.size, "start_step": position.step}
        found |= {"losses": [result.loss for result in results], "norms": [result.grad_norm for result in results]}
        if world.is_main:
            with open(wanted["results"], "a", encoding="utf-8") as stream:
                stream.write(json.dumps(found) + "\n")
    accelerator.end_training()


def differs(stored: dict, held, kind: str, tensor: torch.Tensor) -> bool:
    region = held.region
    rows = stored[f"{kind}/{held.name}"].as_strided((region.count, region.length), (region.stride, 1), region.start)
    return not torch.equal(rows.flatten(), tensor.cpu())


if __name__ == "__main__":
    lifecycle.end_with(main)
