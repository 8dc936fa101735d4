"""train.py without the export at its end, which for a large model takes longer than the steps that are timed."""

from __future__ import annotations

import os
import sys

from train import train

from .. import engines, outcome


def main() -> None:
    plan = engines.plan(sys.argv[1:], os.environ)

    from ..rundir import RunDirectory
    from ..session import Session

    recipe = plan.recipe
    run = RunDirectory(recipe.output_dir, os.environ.get("RANK", "0") == "0")
    with outcome.recorded(run, plan.strategy.launcher, recipe.timeout.step_seconds) as watch:
        accelerator = engines.start(plan)
        train(Session(plan, accelerator, run, watch, sys.argv[1:]))
        accelerator.end_training()


if __name__ == "__main__":
    outcome.end_with(main)
