"""Run under a launcher with train.py's arguments: which threads of gloo are left when main() has returned."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from samecurve.engines import factory
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task = registry.load_task(plan.recipe)
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    accelerator.print("ENGINE", engine.describe().engine)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    code = lifecycle.exit_code(main)  # what end_with does, but for a look between its two halves
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"LEFT {sum('gloo_runloop' in name for name in names)}\n", end="", flush=True)  # at once: there are two
    lifecycle.leave(code)
