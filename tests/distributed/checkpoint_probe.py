"""Run under a launcher with train.py's arguments and a checkpoint's folder first: load it, and save it again as it is.

The checkpoint goes into the recipe's output_dir. Prints the engine that ran, on rank 0.
"""

from __future__ import annotations

import os
import sys

from samecurve.checkpoint.manager import Checkpoints
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.run.metadata import resume_identity
from samecurve.run.run_directory import RunDirectory
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    folder, *arguments = sys.argv[1:]
    plan = preflight.plan(arguments, os.environ)
    run = RunDirectory(plan.recipe.output_dir, is_main=os.environ.get("RANK", "0") == "0")
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    checkpoints = Checkpoints(
        run, plan.recipe, resume_identity(plan, skeleton, task), ControlGroup(), accelerator.print
    )
    engine = factory.build(accelerator, plan, skeleton, task)
    position = checkpoints.load(checkpoints.find(folder), engine)
    checkpoints.save(engine, position, wait=True)
    accelerator.print("ENGINE", engine.describe().engine)
    accelerator.end_training()


if __name__ == "__main__":
    lifecycle.end_with(main)
