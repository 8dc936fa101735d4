"""accelerate launch, torchrun and deepspeed give the same plugin objects and the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import largest_relative_difference, long

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
    world = 4 if strategy == "hsdp" else 2
    return workspace.probe("plugins_probe.py", strategy, world, "batch.micro_batch_size=2", launcher=launcher)


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


USERS = {  # in the shapes of TRL's zero3, alignment-handbook's fsdp and LLaMA-Factory's ds_z3_config
    "inline.yaml": {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "no",
        "num_processes": 8,
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "none", "zero3_init_flag": True},
    },
    "of_fsdp1.yaml": {
        "distributed_type": "FSDP",
        "mixed_precision": "no",
        "num_processes": 8,
        "fsdp_config": {
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_sharding_strategy": "FULL_SHARD",
            "fsdp_sync_module_states": True,
            "fsdp_use_orig_params": True,
        },
    },
    "ds_config.json": {
        "train_batch_size": 8,
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 0,
            "max_live_parameters": "1e9",
            "stage3_prefetch_bucket_size": "auto",
            "gather_16bit_weights_on_model_save": True,
        },
    },
}


@pytest.mark.parametrize(
    ("name", "launcher", "engine"),
    [
        ("inline.yaml", "accelerate", "DeepSpeedEngine"),
        ("of_fsdp1.yaml", "fork", "FSDPLlamaForCausalLM"),
        *long(("ds_config.json", "fork", "DeepSpeedEngine")),
        *long(("of_fsdp1.yaml", "accelerate", "FSDPLlamaForCausalLM"), ("inline.yaml", "fork", "DeepSpeedEngine")),
    ],
)
def test_files_of_users_follow_one_process(name, launcher, engine, workspace, reference):
    path = workspace.folder / name
    path.write_text(json.dumps(USERS[name]))
    run = workspace.run(path, 2, "batch.micro_batch_size=2", launcher=launcher)
    assert run.returncode == 0, run.output
    assert (run.facts["engine"], run.facts["world_size"], run.facts["precision"]) == (engine, 2, "fp32")
    assert run.facts["no_effect"] or name == "inline.yaml"
    assert largest_relative_difference(run.column("loss"), reference.column("loss")) < 1e-5
    assert largest_relative_difference(run.column("grad_norm"), reference.column("grad_norm")) < 1e-4


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
