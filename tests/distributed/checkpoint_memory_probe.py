"""Run under a launcher with train.py's arguments: how far this process's memory grows while it saves and loads.

Prints, from rank 0, the largest growth of any rank, in units of the model's fp32 weights, of each way to do it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from samecurve.checkpoint.manager import Checkpoints, TrainProgress
from samecurve.data.batches import StepBatches
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.run.metadata import resume_identity
from samecurve.run.run_directory import RunDirectory
from samecurve.strategy import preflight
from samecurve.tasks import registry

OWN = Path("/proc/self")


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    run = RunDirectory(plan.recipe.output_dir, is_main=os.environ.get("RANK", "0") == "0")
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    for step, micro_batches in enumerate(StepBatches(task.train, 0, plan.recipe.batch, engine.shard, 2)):
        engine.step(micro_batches, 1e-3 * step)
    facts, sizes = resume_identity(plan, skeleton, task), [parameter.numel() for parameter in skeleton.parameters()]

    def checkpoints(background: bool) -> Checkpoints:
        return Checkpoints(run, plan.recipe, facts, ControlGroup(), accelerator.print, background=background)

    streamed, copied = checkpoints(background=False), checkpoints(background=True)
    folder = run.checkpoints / "step_00000002"
    streamed.save(engine, TrainProgress(step=1, updates=2), wait=True)  # libraries load what they need
    found = {
        "engine": engine.describe().engine,
        "weights_mib": 4 * sum(sizes) / 2**20,
        "largest_parameter": max(sizes) / sum(sizes),
        "streamed": growth(lambda: streamed.save(engine, TrainProgress(step=2, updates=2), wait=True)),
        "loaded": growth(lambda: streamed.load(folder, engine)),
        "copied": growth(lambda: copied.save(engine, TrainProgress(step=3, updates=2), wait=True)),
    }
    for key in ("streamed", "loaded", "copied"):
        most = accelerator.gather(torch.tensor([found[key]])).max().item()
        found[key] = most / (4 * sum(sizes))
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


def growth(work: Callable[[], object]) -> float:
    """Bytes of resident memory at the most while it works, above what there was before."""
    (OWN / "clear_refs").write_text("5")  # resets the peak (proc(5))
    before = resident("VmRSS")
    work()
    return float(resident("VmHWM") - before)


def resident(name: str) -> int:
    line = next(line for line in (OWN / "status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    lifecycle.end_with(main)
