"""train.py without the export at its end, which for a large model takes longer than the steps that are timed."""

from __future__ import annotations

import os
import sys

from samecurve.engines import factory
from samecurve.run import lifecycle
from train import train


def main() -> None:
    plan = factory.plan(sys.argv[1:], os.environ)

    from samecurve.run.run_directory import RunDirectory
    from samecurve.training.session import Session

    recipe = plan.recipe
    run = RunDirectory(recipe.output_dir, os.environ.get("RANK", "0") == "0")
    with lifecycle.supervised(run, plan.strategy.launcher, recipe.watchdog.timeout_seconds) as watch:
        accelerator = factory.start(plan)
        train(Session(plan, accelerator, run, watch))
        accelerator.end_training()


if __name__ == "__main__":
    lifecycle.end_with(main)
