"""Run under a launcher with train.py's arguments and a checkpoint's folder first: load it, and save it again as it is.

The checkpoint goes into the recipe's output_dir. Prints the engine that ran, on rank 0.
"""

from __future__ import annotations

import os
import sys

from samecurve import engines, model, outcome, tasks
from samecurve.checkpoint.manager import Checkpoints
from samecurve.facts import decisive
from samecurve.rundir import RunDirectory
from samecurve.world import World


def main() -> None:
    folder, *arguments = sys.argv[1:]
    plan = engines.plan(arguments, os.environ)
    run = RunDirectory(plan.recipe.output_dir, is_main=os.environ.get("RANK", "0") == "0")
    accelerator = engines.start(plan)
    task = tasks.load(plan.recipe)
    skeleton = model.skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    checkpoints = Checkpoints(run, decisive(plan, skeleton, task), World(), accelerator.print)
    engine = engines.build(accelerator, plan, skeleton, task)
    position = checkpoints.load(checkpoints.find(folder), engine)
    checkpoints.save(engine, position, wait=True)
    accelerator.print("ENGINE", engine.describe()["engine"])
    accelerator.end_training()


if __name__ == "__main__":
    outcome.end_with(main)
