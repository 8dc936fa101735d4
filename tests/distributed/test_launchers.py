"""accelerate launch, torchrun and deepspeed give the same plugin objects and the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import launch_command, long

LAUNCHERS = ["torchrun", "accelerate", "deepspeed"]


@pytest.mark.parametrize(
    "strategy",
    [
        *long("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "pipeline"),
        *long("tp", "fsdp_tp"),
    ],
)
def test_same_plugins(strategy, workspace):
    made = {launcher: plugins(workspace, strategy, launcher) for launcher in LAUNCHERS}
    assert [made[launcher].pop("launcher") for launcher in LAUNCHERS] == LAUNCHERS
    assert made["accelerate"] == made["torchrun"]
    assert made["deepspeed"] == made["torchrun"]
    sharded = {"FullyShardedDataParallelPlugin"}  # without a ParallelismConfig: the mesh is the project's own
    expected = {"ddp": set(), "tp": set(), "fsdp": sharded, "hsdp": sharded, "fsdp_tp": sharded}
    names = {name for name in made["torchrun"] if name[0].isupper()}
    assert names == expected.get(strategy, {"DeepSpeedPlugin"})


def plugins(workspace, strategy: str, launcher: str) -> dict:
    path, script = workspace.strategy(strategy), str(Path(__file__).with_name("plugins_probe.py"))
    world = 4 if strategy == "hsdp" else 2
    command = launch_command(launcher, path, world, workspace.folder, script)
    arguments = [str(workspace.recipe), "batch.micro_batch_size=2"]
    if launcher != "accelerate":
        arguments += ["--strategy", str(path)]
    run = workspace.execute(command + arguments, workspace.folder)
    assert run.returncode == 0, run.output
    return json.loads(run.output.split("FOUND ", 1)[1].splitlines()[0])


# quickstart.sh, which the tests run every day, starts with `accelerate launch`
@pytest.mark.parametrize("launcher", ["deepspeed", *long("accelerate")])
@pytest.mark.parametrize("strategy", ["zero3", *long("fsdp", "pipeline")])
def test_same_losses(strategy, launcher, workspace):
    micro = f"batch.micro_batch_size={4 if strategy == 'pipeline' else 2}"
    expected = workspace.run(strategy, 2, micro, "precision=fp32")
    found = workspace.run(strategy, 2, micro, "precision=fp32", launcher=launcher)
    assert found.returncode == 0, found.output
    assert found.facts["launcher"] == launcher
    assert found.column("loss") == expected.column("loss")
    assert found.column("grad_norm") == expected.column("grad_norm")


@pytest.mark.parametrize("strategy", long("tp", "fsdp_tp"))
def test_accelerate_starts_tensor_parallelism(strategy, workspace):
    """By a file with a key that Accelerate does not know."""
    path, micro = workspace.sequence_parallel(strategy), "batch.micro_batch_size=4"
    expected, found = (workspace.run(path, 2, micro, launcher=launcher) for launcher in ("fork", "accelerate"))
    assert expected.returncode == found.returncode == 0, expected.output + found.output
    assert found.facts["launcher"] == "accelerate" and found.facts["tp_sequence_parallel"]
    assert found.column("loss") == expected.column("loss")
    assert found.column("grad_norm") == expected.column("grad_norm")


@pytest.mark.parametrize("launcher", long("accelerate", "torchrun"))
def test_plain_python_is_the_single_strategy(launcher, workspace, reference):
    found = workspace.run("single", 1, "batch.micro_batch_size=8", launcher=launcher)
    assert found.returncode == 0, found.output
    assert (reference.facts["launcher"], found.facts["launcher"]) == ("python", launcher)
    assert found.facts["engine"] == reference.facts["engine"] and found.facts["strategy"] == "single"
    assert found.column("loss") == reference.column("loss")


def test_a_bare_deepspeed_json_is_a_strategy(workspace):
    expected = workspace.run("zero2", 2, "batch.micro_batch_size=2", "precision=fp32")
    found = workspace.run(Path("ds_configs/zero2.json"), 2, "batch.micro_batch_size=2", "precision=fp32")
    assert found.returncode == 0, found.output
    assert found.facts["engine"] == "DeepSpeedEngine" and found.facts["zero_stage"] == 2
    assert found.column("loss") == expected.column("loss")
