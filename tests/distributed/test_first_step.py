"""The check of a session's first update finds what does not follow the recipe, under every engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import launch_command, long
from test_equal_curves import ENGINES, libaio_is_installed

WORLDS = {"single": 1, "hsdp": 4, "fsdp_tp": 4, "zero3_hpz": 4, "pp_fsdp_tp": 8, "fsdp_tp_cp": 4}
EVERY_DAY = ["fsdp", "zero3", "pipeline"]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        *((name, "fp32") for name in EVERY_DAY),
        *long(*((name, "fp32") for name in ENGINES if name not in EVERY_DAY)),
        *long(*((name, "bf16") for name in ENGINES)),
    ],
)
def test_planted_differences_are_found(strategy, precision, workspace):
    if strategy == "zero3_nvme" and not libaio_is_installed():
        pytest.skip("NVMe offload needs libaio: apt-get install libaio-dev")
    path, world = workspace.strategy(strategy), WORLDS.get(strategy, 2)
    script = str(Path(__file__).with_name("first_step_probe.py"))
    command = launch_command("fork", path, world, workspace.folder, script)
    arguments = [str(workspace.recipe), f"precision={precision}", "batch.micro_batch_size=1", "--strategy", str(path)]
    run = workspace.execute([*command, *arguments], workspace.folder)
    assert run.returncode == 0, run.output
    found = json.loads(run.output.split("FOUND ", 1)[1].splitlines()[0])
    assert found["engine"] == ENGINES[strategy]
    assert found["as it should be"] == "" and found["later"] == "", found
    for key, text in (
        ("rows", "batch.global_batch_size: each of 8 rows has to be read once, but row 0 was read"),
        ("learning rate", "optimizer.learning_rate: the schedule says 0.001, but the optimizer used 0.002"),
        ("clipping", "optimizer.max_grad_norm: 0.8 makes a gradient norm of"),
    ):
        header, line, *_ = found[key].splitlines()
        assert f"strategy {strategy}: the first step did not do what the recipe says" in header
        assert text in line and len(found[key].splitlines()) == 3, found[key]
