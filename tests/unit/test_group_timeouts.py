"""Process groups wait longer than the watchdog, whoever creates them."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
from types import SimpleNamespace
import torch
from torch import distributed as dist
from samecurve.config.schema import Recipe
from samecurve.distributed.control_group import TIMEOUT
from samecurve.engines.start import build_accelerator
from samecurve.strategy.plan import Strategy

strategy = Strategy("ddp", distributed=True, launcher="accelerate")
recipe = SimpleNamespace(
    precision="fp32", output_dir=".", seed=0, fp8="off",
    model=SimpleNamespace(kernels="torch"), loss=SimpleNamespace(implementation="auto"),
    profile=SimpleNamespace(steps=None), logging=SimpleNamespace(trackers=()),
)
accelerator = build_accelerator(SimpleNamespace(strategy=strategy, recipe=recipe))
later = dist.new_group()  # as DeepSpeed's and HSDP's, without a timeout
for group in (dist.group.WORLD, later):
    found = group._get_backend(torch.device("cpu")).options._timeout
    assert found == TIMEOUT, found
assert not accelerator.prepare_model(torch.nn.BatchNorm1d(2)).broadcast_buffers
dist.destroy_process_group()
"""


def test_groups_of_a_run_outlast_the_watchdog_and_ddp_broadcasts_no_buffers():
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
