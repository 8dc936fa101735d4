"""Run under a launcher with train.py's arguments: prints the plugin objects that Accelerate made."""

from __future__ import annotations

import json
import os
import re
import sys

from samecurve.engines import factory
from samecurve.run import lifecycle
from samecurve.strategy import preflight


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    state = accelerator.state
    plugins = [getattr(state, name, None) for name in ("deepspeed_plugin", "fsdp_plugin", "parallelism_config")]
    found = {type(plugin).__name__: _plain(plugin) for plugin in plugins if plugin is not None}
    found["launcher"], found["mixed_precision"] = plan.strategy.launcher, accelerator.mixed_precision
    found["distributed_type"], found["world"] = str(accelerator.distributed_type), accelerator.num_processes
    accelerator.print("FOUND " + json.dumps(found, sort_keys=True))
    accelerator.wait_for_everyone()  # rank 0 keeps the store through which the others still make their groups
    accelerator.end_training()


def _plain(plugin) -> dict:
    """Functions and configs carry addresses in their repr; names and contents are what is compared."""
    values = {**vars(plugin)}
    if "hf_ds_config" in values:
        values["hf_ds_config"] = plugin.hf_ds_config.config
    shown = {key: getattr(value, "__qualname__", None) or repr(value) for key, value in sorted(values.items())}
    return {key: re.sub(r" at 0x[0-9a-f]+", "", text) for key, text in shown.items()}


if __name__ == "__main__":
    lifecycle.end_with(main)
