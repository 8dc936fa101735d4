"""Strategy files in the shapes of public repositories: which strategy runs, what the recipe gets, what is refused."""

# ruff: noqa: E501 - one file, one line

from __future__ import annotations

import copy
import json

import pytest
import yaml
from report_cases import ACCELERATE, TORCHRUN, Plan, launched, message

from benchmarks import strategy_files
from samecurve.strategy.accelerate_keys import ACCELERATE as YAML_KEYS
from samecurve.strategy.deepspeed_keys import DEEPSPEED
from samecurve.strategy.launchers import Ancestor

SILENT = """\
output_dir: runs/x
steps: 10
model: {config: {model_type: llama, num_hidden_layers: 4}}
tokenizer: {vocabulary_size: 512}
data: {path: text.txt}
batch: {sequence_length: 64}
"""
TYPED = SILENT.replace("64}", "64, global_batch_size: 16, micro_batch_size: 2}") + "precision: fp32\n"

# as `accelerate config` writes it, with the blocks of TRL, alignment-handbook, SimPO, LLaVA and LLaMA-Factory
CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "dynamo_config": {},
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
LION = {"optimizer.betas": (0.9, 0.99), "optimizer.weight_decay": 0.0}  # DeepSpeed's defaults
ZERO_INLINE = {
    "deepspeed_multinode_launcher": "standard",
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "zero_stage": 3,
}
FSDP1 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": True,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,
}
FSDP2 = {  # what `accelerate to-fsdp2` makes of it
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_version": 2,
}
FP16 = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
AUTOS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {**FP16, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
}
AUTO_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
AUTO_DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "last_batch_iteration": -1,
        "total_num_steps": "auto",
        "warmup_min_lr": 0,
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
    },
}
ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
CPU = {"device": "cpu", "pin_memory": True}


def accelerate(kind="MULTI_GPU", **changes):
    return {**CONFIG, "distributed_type": kind, **changes}


def inline(**changes):
    return accelerate("DEEPSPEED", deepspeed_config={**ZERO_INLINE, **changes})


def fsdp(block=FSDP1, **changes):
    return accelerate("FSDP", fsdp_config={**block, **changes})


def zero(zero_optimization, **changes):
    return {**AUTOS, "zero_optimization": zero_optimization, **changes}


# name of the file, its content, and: the strategy, the recipe's values from it, and fragments of the header's lines
# fmt: off
RUN = [
    ("multi_gpu.yaml", accelerate(), "ddp", {}, []),
    ("multi_gpu_fp16.yaml", accelerate(mixed_precision="fp16"), "ddp", {"precision": "fp16"}, ["multi_gpu_fp16.yaml"]),
    ("single_gpu.yaml", accelerate("NO", num_processes=1, mixed_precision="no"), "single", {"precision": "fp32"}, []),
    ("single_gpu_of_8.yaml", accelerate("NO"), "single", {}, ["num_processes"]),
    ("bare_no.yaml", accelerate(False, num_processes=1, fsdp_config=FSDP1), "single", {}, ["fsdp_config"]),
    ("downcast.yaml", accelerate(downcast_bf16=True, tpu_name="t"), "ddp", {}, ["downcast_bf16", "tpu_name"]),
    ("dynamo.yaml", accelerate(dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False}), "ddp", {"compile": "full"}, []),
    ("dynamo_regional.yaml", accelerate(dynamo_config={"dynamo_backend": "inductor", "dynamo_use_regional_compilation": True, "dynamo_use_fullgraph": True}), "ddp", {"compile": "regional"}, ["dynamo_use_fullgraph"]),
    ("ulysses.yaml", {**fsdp(FSDP2), "parallelism_config": {"parallelism_config_sp_size": 2, "parallelism_config_sp_backend": "deepspeed", "parallelism_config_sp_seq_length_is_variable": True, "parallelism_config_sp_attn_implementation": "flash_attention_2"}},
     "fsdp reshard", {}, ["sp_backend", "sp_seq_length_is_variable", "sp_attn_implementation"]),
    ("cpus.yaml", accelerate("MULTI_CPU", use_cpu=True), "ddp", {}, ["use_cpu"]),
    ("old_fp16.yaml", {"distributed_type": "MULTI_GPU", "fp16": False, "num_processes": 2}, "ddp", {}, []),
    ("deepspeed_zero1.yaml", inline(zero_stage=1, gradient_accumulation_steps=1, zero3_init_flag=False), "zero1", {"batch.global_batch_size": 2}, ["zero3_init_flag"]),
    ("deepspeed_zero2.yaml", inline(zero_stage="2", zero3_init_flag=False), "zero2", {}, ["deepspeed_config.zero3_save_16bit_model"]),
    ("deepspeed_zero3.yaml", inline(), "zero3", {}, ["deepspeed_config.zero3_save_16bit_model"]),
    ("zero3_cpu.yaml", inline(offload_optimizer_device="cpu", offload_param_device="cpu", gradient_clipping=0.3), "zero3 optimizer:cpu param:cpu", {"optimizer.max_grad_norm": 0.3}, ["whatever its name says"]),
    ("default_stage.yaml", accelerate("DEEPSPEED", deepspeed_config={}), "zero2", {}, ["Accelerate's default is 2"]),
    ("stage_0.yaml", inline(zero_stage=0), "ddp", {}, ["this is DDP"]),
    ("fsdp1.yaml", fsdp(), "fsdp reshard prefetch", {}, ["FSDP1", "FULL_SHARD", "fsdp_use_orig_params", "fsdp_sync_module_states"]),
    ("fsdp1_numbers.yaml", fsdp(fsdp_sharding_strategy=2, fsdp_activation_checkpointing=True, fsdp_forward_prefetch=False), "fsdp", {"memory.activation_checkpointing": "full"}, ["SHARD_GRAD_OP"]),
    ("fsdp1_shards_nothing.yaml", fsdp(fsdp_sharding_strategy="NO_SHARD"), "ddp", {}, ["NO_SHARD", "this is DDP"]),
    ("hybrid.yaml", fsdp(fsdp_sharding_strategy="HYBRID_SHARD", fsdp_version=1), "fsdp reshard prefetch", {}, ["HYBRID_SHARD"]),
    ("fsdp_new_name.yaml", fsdp({"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}), "fsdp", {}, ["SHARD_GRAD_OP"]),
    ("fsdp_by_size.yaml", fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=2000), "fsdp reshard", {}, ["fsdp_forward_prefetch"]),
    ("fsdp2.yaml", fsdp(FSDP2), "fsdp reshard", {}, ["fsdp_cpu_ram_efficient_loading"]),
    ("fsdp_config_qlora.yaml", fsdp(FSDP2, fsdp_activation_checkpointing=False), "fsdp reshard", {}, []),
    ("ds_z0_config.json", zero({**ZERO2, "stage": 0}), "ddp", {}, ["this is DDP", "zero_optimization.round_robin_gradients"]),
    ("no_block.json", {**AUTOS, "steps_per_print": 10}, "ddp", {}, ["names no stage"]),
    ("ds_z2_config.json", zero(ZERO2, zero_allow_untested_optimizer=True), "zero2", {}, ["zero_allow_untested_optimizer"]),
    ("ds_z2_offload_config.json", zero({**ZERO2, "offload_optimizer": CPU}), "zero2 optimizer:cpu", {}, []),
    ("ds_z3_config.json", zero(ZERO3), "zero3", {}, ["stage3_gather_16bit_weights_on_model_save"]),
    ("ds_z3_offload_config.json", zero({**ZERO3, "offload_optimizer": CPU, "offload_param": CPU}), "zero3 optimizer:cpu param:cpu", {}, []),
    ("ds_config_zero3.json", zero(ZERO3, optimizer=AUTO_ADAMW, scheduler=AUTO_DECAY, steps_per_print=2000, wall_clock_breakdown=False), "zero3", {}, ["recipe's schedule counts", "steps_per_print"]),
    ("zero3_bf16.json", zero(ZERO3, bf16={"enabled": True}, optimizer=AUTO_ADAMW, scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}), "zero3", {}, []),
    ("zero2.json", zero({**ZERO2, "offload_optimizer": CPU}), "zero2 optimizer:cpu", {}, ["zero2.json configures zero2 with offload"]),
    ("second_names.json", zero({"stage": 3, "max_live_parameters": 1e9, "max_reuse_distance": "1e9", "gather_16bit_weights_on_model_save": True, "sub_group_size": 0}), "zero3", {}, ["zero_optimization.stage3_gather_16bit_weights_on_model_save"]),
    ("deprecated.json", zero({"stage": 2, "cpu_offload": True, "stage3_gather_fp16_weights_on_model_save": True}), "zero2 optimizer:cpu", {}, []),
    ("autos.json", zero({"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto", "overlap_comm": "auto", "allgather_bucket_size": "auto", "offload_optimizer": {"device": "auto"}}), "zero3", {}, []),
    ("bf16_loss_scale.json", zero(ZERO3, bf16={"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}), "zero3", {}, ["bf16.loss_scale"]),
    ("bfloat16.json", {"bfloat16": {"enabled": "true"}, "zero_optimization": {"stage": "1"}}, "zero1", {}, []),
    ("unused.json", zero({"stage": 2, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "offload_param": {"device": "none"}}), "zero2", {}, ["zero_optimization.sub_group_size", "stage3_max_live_parameters"]),
    ("fp32.json", zero(ZERO2, fp16={"enabled": False}, bf16={"enabled": False}), "zero2", {"precision": "fp32"}, []),
    ("zero1_torch_compile.json", zero({"stage": 1}, compile={"disable": False, "backend": "inductor"}), "zero1", {}, ["compile"]),
    ("read_nowhere.json", zero(ZERO2, comms_config={"verbose": False}, log={"steps_per_print": 50}, cuda_visible_devices=0, seq_parallel_communication_data_type="bf16"), "zero2", {}, ["comms_config", "log", "cuda_visible_devices", "seq_parallel_communication_data_type"]),
    ("comment.json", zero(ZERO2, _comment="ours", activation_checkpointing={"partition_activations": True}, tensorboard={"enabled": True}), "zero2", {}, ["_comment", "activation_checkpointing.partition_activations", "tensorboard"]),
    ("megatron.json", {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "zero_optimization": {"stage": 1},
                       "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "betas": [0.9, 0.99], "eps": "1e-6", "weight_decay": 0.01}},
                       "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 3, "warmup_type": "linear"}}}, "zero1",
     {"batch.global_batch_size": 64, "batch.micro_batch_size": 4, "optimizer.max_grad_norm": 0.5, "optimizer.learning_rate": 0.00015, "optimizer.betas": (0.9, 0.99),
      "optimizer.epsilon": 1e-6, "optimizer.weight_decay": 0.01, "schedule.name": "linear", "schedule.warmup_steps": 3, "schedule.min_lr_ratio": 0.0}, ["megatron.json"]),
    ("cifar.json", {"train_batch_size": 16, "steps_per_print": 2000, "prescale_gradients": False, "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
                    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 4}}}, "ddp",
     {"batch.global_batch_size": 16, "optimizer.learning_rate": 0.001, "optimizer.betas": (0.8, 0.999), "optimizer.weight_decay": 3e-7, "schedule.name": "constant", "schedule.warmup_type": "log", "schedule.warmup_steps": 4}, []),
    ("lion.json", {"optimizer": {"type": "Lion", "params": {"lr": 1e-5}}, "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}, "zero2", {"optimizer.name": "lion", "optimizer.learning_rate": 1e-5, "batch.global_batch_size": 8, **LION}, []),
    ("switched_off.json", zero({"stage": 2, "elastic_checkpoint": True, "mics_shard_size": -1, "offload_param": {"device": "none", "nvme_path": None}}, elasticity={"enabled": False}, sparse_gradients=False,
                               compile={"enabled": "false"}, autotuning={"enabled": False}, aio={"thread_count": 1}, communication_data_type=None, checkpoint={"load_universal": True}), "zero2", {}, ["elasticity", "sparse_gradients", "checkpoint"]),
    ("bert.json", {"train_batch_size": 4, "fp16": {"enabled": False}, "zero_optimization": True}, "zero1", {"batch.global_batch_size": 4}, ["stage 1"]),
    ("stage3.conf", zero(ZERO3, bf16={"enabled": True}), "zero3", {}, []),  # open-instruct's suffix
    ("accelerate.json", inline(), "zero3", {}, []),
    ("adam.json", {"optimizer": {"type": "Adam", "params": {"lr": 1e-5, "eps": "auto"}}, "zero_optimization": {"stage": 2}}, "zero2", {"optimizer.learning_rate": 1e-5, "optimizer.betas": (0.9, 0.999), "optimizer.weight_decay": 0.0}, []),
    ("sgd.json", {"optimizer": {"type": "SGD", "params": {"lr": 1e-5}}, "zero_optimization": {"stage": 2}}, "zero2", {"optimizer.name": "sgd", "optimizer.learning_rate": 1e-5, "optimizer.weight_decay": 0.0}, ["SGD without momentum is not built"]),
    ("open.json", zero(ZERO3 | {"offload_param": {"device": "auto"}}, amp={"enabled": "auto", "opt_level": "auto"}), "zero3", {}, []),
    ("ipex.yaml", accelerate(ipex_config={"ipex": False, "use_xpu": False}, dynamo_backend="NO", main_process_port=None), "ddp", {}, ["ipex_config"]),
    ("unclipped.json", zero(ZERO2, gradient_clipping=0.0), "zero2", {"optimizer.max_grad_norm": 1e9}, []),
]
# fmt: on


def resolved(folder, monkeypatch, name, content, *overrides, recipe=SILENT, environ=TORCHRUN, ancestors=None):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a file for CPUs is refused where GPUs are seen
    (folder / "r.yaml").write_text(recipe)
    (folder / "text.txt").write_text("words")
    (folder / name).write_text(json.dumps(content))
    alone = content.get("distributed_type") in ("NO", False)
    return message(folder, ["r.yaml", *overrides, "--strategy", name], {} if alone else environ, ancestors)


def described(strategy) -> str:
    words = [f"zero{strategy.zero_stage}" if strategy.zero_stage else strategy.family, *strategy.offload]
    block = strategy.accelerate.get("fsdp_config", {}) if strategy.family == "fsdp" else {}
    words += ["reshard"] * (block.get("fsdp_reshard_after_forward") is True)
    return " ".join([*words, *["prefetch"] * strategy.fsdp_forward_prefetch])


@pytest.mark.parametrize(("name", "content", "strategy", "values", "lines"), RUN, ids=[case[0] for case in RUN])
def test_public_files_run(name, content, strategy, values, lines, tmp_path, monkeypatch):
    plan = resolved(tmp_path, monkeypatch, name, content)
    assert isinstance(plan, Plan), plan[0]
    assert described(plan.strategy) == strategy
    assert set(plan.from_strategy) == set(values)
    for key, value in values.items():
        block = plan.recipe
        for part in key.split("."):
            block = getattr(block, part)
        assert block == value, key
    text = "\n".join(plan.notes)
    assert [line for line in lines if line not in text] == []
    assert all(key in text for key in (*plan.no_effect, *plan.from_strategy)), "nothing is ignored silently"
    assert (name in YAML_KEYS) is False and plan.strategy.world_size in (1, 2)


@pytest.mark.parametrize(("name", "content"), [case[:2] for case in RUN], ids=[case[0] for case in RUN])
def test_the_engines_get_what_the_libraries_read(name, content, tmp_path, monkeypatch):
    """Accelerate's own launcher takes the YAML's content, and DeepSpeed's own configuration the JSON's."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime.config import DeepSpeedConfig

    from samecurve.accelerator.launch_env import environment
    from samecurve.strategy.plan import resolve_auto

    plan = resolved(tmp_path, monkeypatch, name, content)
    found = environment(plan.strategy)
    if plan.strategy.family == "fsdp":
        block = content["fsdp_config"]
        sharded_again = str(block.get("fsdp_sharding_strategy", "FULL_SHARD")) in ("FULL_SHARD", "HYBRID_SHARD")
        sharded_again &= block.get("fsdp_reshard_after_forward") in (True, None)
        assert (found["FSDP_VERSION"], found["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("2", "false")
        assert found["FSDP_RESHARD_AFTER_FORWARD"] == str(sharded_again).lower()
    if plan.strategy.backend == "deepspeed":
        config = resolve_auto(plan)
        for key in [key for key, value in config["zero_optimization"].items() if value == "auto"]:
            config["zero_optimization"][key] = 1000  # as Accelerate does, from the model's size
        config["train_batch_size"] //= 2  # DeepSpeed counts the ranks of this process's world
        assert DeepSpeedConfig(config).zero_config.stage == plan.strategy.zero_stage
        assert HfDeepSpeedConfig(config).is_zero3() == (plan.strategy.zero_stage == 3)


# fmt: off
REFUSED = [
    (zero(ZERO2, compression_training={}), "compression_training", ["removed the compression library"]),
    (zero(ZERO2, autotuning={"enabled": True}), "autotuning", ["runs other than the recipe's"]),
    (zero(ZERO2, data_efficiency={"enabled": True}), "data_efficiency", ["changes the data"]),
    (zero(ZERO2, curriculum_learning={"enabled": True}), "curriculum_learning", ["removed the old curriculum"]),
    (zero(ZERO2, tensor_parallel={"autotp_size": 2}), "tensor_parallel", ["AutoTP", "configs/fsdp_tp.yaml"]),
    (zero(ZERO2, compile={"deepcompile": True}), "compile", ["compared with one process"]),
    ({**inline(), "parallelism_config": {"parallelism_config_sp_size": 2}}, "parallelism_config", ["FSDP and MULTI_GPU", "configs/fsdp_*.yaml"]),
    (zero({**ZERO2, "round_robin": True}), "zero_optimization.round_robin", ["did you mean round_robin_gradients"]),
    (zero(ZERO2, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 10}}), "optimizer.type", ["OneBitAdam", "AdamW, Adam, Lion"]),
    (zero(ZERO2, optimizer={"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False}}), "optimizer.params.adam_w_mode", ["not built"]),
    (zero(ZERO2, scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 1e-4}}), "scheduler.type", ["OneCycle", "WarmupLR"]),
    (zero(ZERO2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_min_lr": 1e-6}}), "scheduler.params.warmup_min_lr", ["begins at 0"]),
    (zero(ZERO2, fp16={"enabled": True}, bf16={"enabled": True}), "bf16.enabled", ["fp16.enabled is true"]),
    (zero(ZERO2, bf16={"enabled": "yes"}), "bf16.enabled", ["yes", "true, false"]),
    (zero(ZERO2, train_batch_size=64, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2), "gradient_accumulation_steps", ["64", "micro_batch_size is 4", "8 on 2"]),
    (zero({"stage": 3, "max_live_parameters": 5, "stage3_max_live_parameters": 6}), "zero_optimization.max_live_parameters", ["another name", "keep one"]),
    (accelerate(mixed_precision="fp8"), "mixed_precision", ["fp8", "recipe's key fp8"]),
    (accelerate("MEGATRON_LM"), "distributed_type", ["MEGATRON_LM", "DEEPSPEED"]),
    (inline(zero_stage=4), "deepspeed_config.zero_stage", ["4", "0, 1, 2, 3"]),
    (fsdp(fsdp_sharding_strategy="SHARDED"), "fsdp_config.fsdp_sharding_strategy", ["SHARDED", "FULL_SHARD"]),
    (fsdp(fsdp_reshard_after_forward=False), "fsdp_config.fsdp_sharding_strategy", ["FULL_SHARD", "keep one"]),
]
# fmt: on


@pytest.mark.parametrize(("content", "key", "fragments"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_would_change_the_run_is_refused(content, key, fragments, tmp_path, monkeypatch):
    name = "mine.yaml" if "distributed_type" in content else "mine.json"
    report, code = resolved(tmp_path, monkeypatch, name, copy.deepcopy(content))
    header, *lines = report.splitlines()
    assert (header, code) == ("1 problem in the configuration", 2), report
    assert f": {key}: " in lines[0] and not [part for part in fragments if part not in lines[0]], report


# fmt: off
BOTH = [  # the file's keys, the recipe's key, its value there, what the recipe could say
    ({"bf16": {"enabled": True}}, "precision", '"fp32" (r.yaml:7)', "precision=bf16"),
    ({"train_batch_size": 32}, "batch.global_batch_size", "16 (r.yaml:6)", "batch.global_batch_size=32"),
    ({"train_micro_batch_size_per_gpu": 4}, "batch.micro_batch_size", "2 (r.yaml:6)", "batch.micro_batch_size=4"),
    ({"gradient_accumulation_steps": 2}, "batch.global_batch_size", "4 on 2 data-parallel ranks", "batch.global_batch_size=8"),
    ({"scheduler": {"params": {"total_num_steps": 20, "warmup_type": "linear"}}}, "steps", "10 (r.yaml:2)", "steps=20"),
]
# fmt: on


def test_an_open_value_of_the_json_is_the_yamls(tmp_path, monkeypatch):
    """As Accelerate documents "auto"."""
    (tmp_path / "z3.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}})
    )
    block = {"deepspeed_config_file": "z3.json", "offload_param_device": "cpu"}
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": block}
    assert resolved(tmp_path, monkeypatch, "a.yaml", content).strategy.offload == ("param:cpu",)


@pytest.mark.parametrize(
    ("environ", "flags", "replicas"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, None, 2),  # torchrun
        ({"LOCAL_WORLD_SIZE": "8"}, None, 1),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, ["--num_machines", "2", "--num_processes", "8"], 2),
    ],
)
def test_replicas_are_the_launchers_machines(environ, flags, replicas, tmp_path, monkeypatch):
    ancestors = (
        [Ancestor(("accelerate", "launch", "--config_file", "a.yaml", *flags, "train.py"), str(tmp_path))]
        if flags
        else []
    )
    environ |= {"WORLD_SIZE": "8", "RANK": "0", **({} if flags else {"TORCHELASTIC_RUN_ID": "none"})}
    content = fsdp(fsdp_sharding_strategy="HYBRID_SHARD", fsdp_version=1) | {"parallelism_config": None}
    plan = resolved(tmp_path, monkeypatch, "a.yaml", content, environ=environ, ancestors=lambda: ancestors)
    assert plan.strategy.dims.dp_replicate == replicas


def test_one_accumulation_step_is_a_default_of_tools(tmp_path, monkeypatch):
    """`accelerate config` writes it without asking; the recipe's rows of a step stay, and the header says so."""
    keys = {"gradient_accumulation_steps": 1, "zero_optimization": ZERO2}
    plan = resolved(tmp_path, monkeypatch, "mine.json", keys, recipe=TYPED)
    assert plan.recipe.batch.global_batch_size == 16 and "gradient_accumulation_steps" in plan.no_effect
    assert any("without effect here: gradient_accumulation_steps" in note for note in plan.notes)


@pytest.mark.parametrize(("keys", "owner", "value", "remedy"), BOTH, ids=[case[1] for case in BOTH])
def test_both_files_say_different_things(keys, owner, value, remedy, tmp_path, monkeypatch):
    report, code = resolved(tmp_path, monkeypatch, "mine.json", {**keys, "zero_optimization": ZERO2}, recipe=TYPED)
    assert code == 2 and report.startswith("1 problem"), report
    assert f"the recipe sets this: {owner} is" in report and value in report and "or remove it" in report
    assert f"or give the recipe {remedy}" in report
    agreed = resolved(tmp_path, monkeypatch, "mine.json", {**keys, "zero_optimization": ZERO2}, remedy, recipe=TYPED)
    assert isinstance(agreed, Plan) and not agreed.from_strategy


@pytest.mark.parametrize(
    ("overrides", "number", "sizes"),
    [
        ((), 16, (32, 1)),  # rows = the default micro-batch x 16 x 2 ranks
        (("batch.micro_batch_size=4",), 2, (16, 4)),
        (("batch.global_batch_size=24",), 3, (24, 4)),
        (("batch.global_batch_size=16", "batch.micro_batch_size=4"), 2, (16, 4)),
    ],
)
def test_accumulation_gives_what_the_recipe_leaves_open(overrides, number, sizes, tmp_path, monkeypatch):
    content = {"gradient_accumulation_steps": number, "zero_optimization": {"stage": 1}}
    plan = resolved(tmp_path, monkeypatch, "mine.json", content, *overrides)
    batch = plan.recipe.batch
    assert (batch.global_batch_size, batch.micro_batch_size) == sizes and batch.accumulation_steps(2) == number


@pytest.mark.parametrize("folder", [".", "configs"])
def test_yaml_and_json_together(folder, tmp_path, monkeypatch):
    """The JSON is found from the YAML's folders, too, and keys that both have must agree."""
    (tmp_path / "repository" / folder).mkdir(parents=True)
    (tmp_path / "repository" / "ds.json").write_text(json.dumps(zero({**ZERO3, "stage": "auto"})))
    name = f"repository/{folder}/mine.yaml"
    content = accelerate("DEEPSPEED", deepspeed_config={"deepspeed_config_file": "ds.json", **ZERO_INLINE})
    plan = resolved(tmp_path, monkeypatch, name, content)
    assert isinstance(plan, Plan), plan[0]
    assert plan.strategy.zero_stage == 3 and "ds.json" in plan.notes[0]
    (tmp_path / "repository" / "ds.json").write_text(json.dumps(zero(ZERO2, fp16={"enabled": True})))
    report, _ = resolved(tmp_path, monkeypatch, name, content)
    assert "deepspeed_config.zero_stage: found 3, but zero_optimization.stage is 2" in report
    assert 'fp16.enabled: found true, but mixed_precision is "bf16"' in report


@pytest.mark.parametrize(("environ", "unread"), [(TORCHRUN, {"gpu_ids", "main_process_port"}), (ACCELERATE, set())])
def test_keys_of_another_launcher_are_listed(environ, unread, tmp_path, monkeypatch):
    content = accelerate(gpu_ids="0,1", main_process_port=29501)
    started = launched("--config_file", "mine.yaml", "--num_processes", "2", "train.py")
    plan = resolved(tmp_path, monkeypatch, "mine.yaml", content, environ=environ, ancestors=started)
    assert set(plan.no_effect) & {"gpu_ids", "main_process_port"} == unread


def test_accelerate_launch_exports_are_replaced(tmp_path, monkeypatch):
    """accelerate launch has made variables of the file as it is written; the engines get those of what it means."""
    from samecurve.accelerator.launch_env import export_launch_env

    stale = {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "1", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    environ = {**ACCELERATE, **stale, "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true"}
    started = launched("--config_file", "fsdp1.yaml", "--num_processes", "2", "train.py")
    plan = resolved(tmp_path, monkeypatch, "fsdp1.yaml", fsdp(), environ=environ, ancestors=started)
    assert isinstance(plan, Plan), plan[0]
    monkeypatch.setattr("os.environ", dict(environ))
    import os

    export_launch_env(plan.strategy, os.environ)
    wanted = {"FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "ACCELERATE_MIXED_PRECISION": "no"}
    assert {key: os.environ.get(key) for key in wanted} == wanted and plan.recipe.precision == "bf16"


def test_rules_of_the_tables_have_reasons():
    from scripts.pages.strategy_keys import rows

    seen = list(rows(YAML_KEYS)) + list(rows(DEEPSPEED))
    assert len(seen) > 200 and all(row.meaning for row in seen)
    assert {row.kind for row in seen} == {"used", "recipe", "no effect", "refused"}


PATH = "base: small.yaml\nmodel: {path: of/others}\n"
# of a recipe on TYPED: what it has of the file below
YIELD = [
    (PATH, {"precision": "bf16", "batch.micro_batch_size": 8, "schedule.warmup_steps": 3}),
    (PATH + "batch: {micro_batch_size: 1}", {"precision": "bf16", "batch.global_batch_size": 2}),
    (PATH + "batch: {global_batch_size: 4}", {"precision": "bf16", "batch.global_batch_size": None}),
    (PATH + "schedule: {warmup_steps: 3}", {"precision": "bf16", "schedule.warmup_steps": None}),
    (PATH + "precision: fp32", "fp32"),
    ("base: small.yaml", "fp32"),
]


@pytest.mark.parametrize(("recipe", "taken"), YIELD)
def test_values_for_a_replaced_model_yield_to_the_file(recipe, taken, tmp_path, monkeypatch):
    """Those of a base file; what the recipe itself gives is kept."""
    (tmp_path / "small.yaml").write_text(TYPED + "task: sft\nschedule: {warmup_ratio: 0.5}\n")
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}
    content = zero(ZERO2, gradient_accumulation_steps=1, bf16={"enabled": True}, scheduler=scheduler)
    found = resolved(tmp_path, monkeypatch, "mine.json", content, recipe=recipe)
    if taken == "fp32":
        assert isinstance(found, tuple) and 'precision is "fp32"' in found[0]
        return
    assert isinstance(found, Plan), found[0]
    for key, value in taken.items():
        block, _, name = key.rpartition(".")
        assert (key in found.from_strategy) == (value is not None), key
        assert value in (None, getattr(getattr(found.recipe, block) if block else found.recipe, name)), key
    assert "precision: fp32 of small.yaml:7 was for a model from scratch" in found.notes


def test_public_files_are_counted_by_repository(tmp_path, monkeypatch, capsys):
    (tmp_path / "owner+name" / "configs").mkdir(parents=True)
    files = {"a.yaml": fsdp(), "b.json": zero(ZERO2), "c.json": zero(ZERO2, compression_training={})}
    for name, content in files.items():
        (tmp_path / "owner+name" / "configs" / name).write_text(
            yaml.safe_dump(content) if "yaml" in name else json.dumps(content)
        )
    monkeypatch.chdir(tmp_path)  # which the program leaves
    monkeypatch.setattr("sys.argv", ["strategy_files", str(tmp_path)])
    strategy_files.main()
    table, report = capsys.readouterr().out.split("\n\n")
    assert table.splitlines()[-1] == "| owner/name | 1 | 1 | 2 | 1 |"
    assert report.startswith("owner+name/configs/c.json\n1 problem") and "compression_training" in report
