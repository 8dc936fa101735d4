"""The keys of a DeepSpeed JSON and how each is treated (accelerate_keys.py defines the rule types)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

from samecurve.specs.environment import dated
from samecurve.strategy.accelerate_keys import (
    ACCUMULATION,
    BOOLEAN,
    COUNT,
    DTYPE,
    FRACTION,
    NATURAL,
    NOT_NEGATIVE,
    NUMBER,
    TEXT,
    TEXTS,
    NoEffect,
    RecipeOwned,
    Rejected,
    Table,
    ValueRule,
    clipping,
    enabled,
    number,
    one_of,
    only,
    optional,
    or_auto,
    read_as,
    whole_number,
)

_DEEPSPEED = dated("deepspeed")  # another version may do what this one cannot


def _removed(what: str, instead: str = "remove it") -> Rejected:
    return Rejected(f"{_DEEPSPEED} has removed {what}; {instead}", (None, False))


_PRECISION = Rejected(
    "every strategy keeps fp32 master weights, gradients and optimizer states; remove it", (None, False)
)
_QUANTISED = Rejected(
    f"ZeRO++ of {_DEEPSPEED} rounds what it sends to 8 or 4 bits, which changes the loss curve; remove it",
    (None, False),
)
_UNCOMPARED = f"it has not been compared with one process ({_DEEPSPEED}); remove it"
_MONITOR = NoEffect("the recipe's logging.trackers get the metrics, and the run directory has them")
_OLD_OFFLOAD = NoEffect("a deprecated key, which asks for no offload", only(False, "use offload_optimizer"))
_CHECKPOINT = NoEffect("the recipe's checkpoint block sets this; checkpoints have a format of their own")
_OWN_LINES = NoEffect("DeepSpeed's own lines are off; the header, metrics.jsonl and `profile` show more")
_TENSOR_PARALLEL = Rejected(  # module_inject/layers.py
    f"AutoTP of {_DEEPSPEED} keeps a rank's part of a weight as a plain tensor, and samecurve's checkpoints find parts "
    "by the DTensors of transformers' plans; remove it, or use configs/fsdp_tp.yaml"
)
# module_inject/auto_ep_layer.py: a router and experts by other names, which the router losses do not see
_EXPERTS = Rejected(
    f"{_DEEPSPEED} replaces a mixture's layers by its own, whose weights and router losses samecurve does not know; "
    "remove it, or use configs/fsdp_ep.yaml"
)
# runtime/sequence_parallel/ulysses_sp.py
_SEQUENCE = (
    f"Ulysses of {_DEEPSPEED} drops the masks between packed documents; remove it, or use configs/fsdp_ulysses.yaml"
)
_PLAIN_COMPILE = ValueRule(
    f"a block without deepcompile and passes, which have not been compared with one process ({_DEEPSPEED})",
    lambda block: isinstance(block, dict) and not any(block.get(key) for key in ("deepcompile", "passes")),
)
_READ_NOWHERE = NoEffect("DeepSpeed reads no such key", foreign=True)
_RECOMPUTATION = NoEffect("Hugging Face's models do not call it; memory.activation_checkpointing recomputes")
_LOSS_SCALE = NoEffect("bf16 needs no loss scale", foreign=True)
# runtime/pipe/engine.py: only if is_model_parallel
_PARTITIONED = Rejected(
    f"the pipeline of {_DEEPSPEED} partitions activations among tensor-parallel ranks only, and these are refused "
    "(see tensor_parallel); remove it",
    (None, False),
)


def _partition(value: Any) -> bool:
    """Whether a value is a partition method of DeepSpeed 0.19.

    DeepSpeed drops what follows a second colon. Its method "profile" is not implemented (runtime/pipe/module.py).
    """
    if not isinstance(value, str) or not value.startswith("type:"):
        return value in ("parameters", "uniform")
    with contextlib.suppress(re.error):
        return bool(re.compile(value[5:]).pattern) and ":" not in value[5:]
    return False


_PARTITION = ValueRule('"parameters", "uniform" or "type:" with a regular expression', _partition)

# fp32 ends at 2 ** 128
_SCALE_POWER = ValueRule("an integer from 0 to 127", lambda value: NATURAL.accepts(value) and value < 128)


def _names(known: dict[str, str], others: str) -> Callable[[Any], tuple]:
    """Values of a recipe key that names one of several: the file's names, in small letters, and the recipe's."""

    def read(value: Any) -> tuple:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError(others)
        return (known[value.lower()],)

    return read


_NO_OTHER = "which would change what is trained, and only {} are built; remove the block, or use one of them"
OPTIMIZER: Table = {
    "type": RecipeOwned(
        "optimizer.name",
        values=_names(
            {"adamw": "adamw", "adam": "adamw", "lion": "lion", "sgd": "sgd", "adafactor": "adafactor"},
            _NO_OTHER.format("AdamW, Adam, Lion, SGD and Adafactor"),
        ),
    ),
    "params": {
        "lr": RecipeOwned("optimizer.learning_rate", auto=True, values=number),
        "betas": RecipeOwned("optimizer.betas", auto=True),
        "eps": RecipeOwned("optimizer.epsilon", auto=True, values=number),
        "weight_decay": RecipeOwned("optimizer.weight_decay", auto=True, values=number),
        "momentum": RecipeOwned("optimizer.momentum", auto=True, values=number),
        "bias_correction": NoEffect("AdamW always corrects its bias", only(True, "AdamW corrects its bias")),
        "adam_w_mode": NoEffect(
            "decay is always apart from the gradient",
            only(True, "false adds decay to the gradient, which is not built"),
        ),
        "torch_adam": NoEffect("optimizer.implementation chooses the kernel"),
        "fused": NoEffect("optimizer.implementation chooses the kernel"),
        "amsgrad": Rejected("AMSGrad is not built; remove it", (None, False)),
        "max_grad_norm": RecipeOwned("optimizer.max_grad_norm", auto=True, values=clipping),
    },
    "legacy_fusion": NoEffect("optimizer.implementation chooses the kernel"),
}
SCHEDULER: Table = {
    "type": RecipeOwned(
        "schedule.name",
        values=_names(
            {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"},
            _NO_OTHER.format("WarmupLR, WarmupDecayLR and WarmupCosineLR"),
        ),
    ),
    "params": {
        "total_num_steps": RecipeOwned("steps", auto=True, values=whole_number),
        "warmup_num_steps": RecipeOwned("schedule.warmup_steps", auto=True, values=read_as(NATURAL, int)),
        "warmup_max_lr": RecipeOwned("optimizer.learning_rate", auto=True, values=number),
        "cos_min_ratio": RecipeOwned("schedule.min_lr_ratio", auto=True, values=number),
        "warmup_min_lr": Rejected("warm-up begins at 0; set it to 0, or remove it", (None, 0, 0.0, "auto")),
        "warmup_min_ratio": Rejected("warm-up begins at 0; set it to 0, or remove it", (None, 0, 0.0, "auto")),
        "last_batch_iteration": Rejected("a run counts its steps itself; remove it", (None, -1)),
        "warmup_type": RecipeOwned("schedule.warmup_type", values=read_as(one_of("linear", "log"))),
    },
}

ZERO: Table = {
    "stage": one_of(0, 1, 2, 3),
    "contiguous_gradients": BOOLEAN,
    "reduce_scatter": BOOLEAN,
    "reduce_bucket_size": or_auto(COUNT),
    "use_multi_rank_bucket_allreduce": BOOLEAN,
    "allgather_partitions": BOOLEAN,
    "allgather_bucket_size": COUNT,
    "overlap_comm": optional(BOOLEAN),
    "compute_grad_norm": only(True, "every step reports the gradient norm"),
    "load_from_fp32_weights": BOOLEAN,
    "sub_group_size": NATURAL,
    "ignore_unused_parameters": BOOLEAN,
    "round_robin_gradients": BOOLEAN,
    "parameter_alignment": BOOLEAN,
    "zero_hpz_partition_size": COUNT,
    "memory_efficient_linear": BOOLEAN,
    "override_module_apply": BOOLEAN,
    "log_trace_cache_warnings": BOOLEAN,
    "enable_sanity_checks": BOOLEAN,
    "stage3_prefetch_bucket_size": or_auto(NATURAL),
    "stage3_param_persistence_threshold": or_auto(NATURAL),
    "stage3_model_persistence_threshold": NATURAL,
    "stage3_max_live_parameters": NATURAL,
    "stage3_max_reuse_distance": NATURAL,
    "stage3_gather_16bit_weights_on_model_save": NoEffect("the export gathers the weights itself, in fp32", BOOLEAN),
    "stage3_module_granularity_threshold": Rejected(  # also without samecurve: runtime/zero/parameter_offload.py
        f"the first backward pass of {_DEEPSPEED} fails with it; name the modules in leaf_module instead, or remove it",
        (None, 0),
    ),
    "stage3_use_all_reduce_for_fetch_params": BOOLEAN,
    "stage3_allgather_sequential": BOOLEAN,
    "leaf_module": {"classes": TEXTS, "names": TEXTS, "name_suffixes": TEXTS},
    "offload_optimizer": {
        "device": one_of("none", "cpu", "nvme"),
        "nvme_path": TEXT,
        "buffer_count": COUNT,
        "pin_memory": BOOLEAN,
        "pipeline_read": BOOLEAN,
        "pipeline_write": BOOLEAN,
        "fast_init": BOOLEAN,
        "ratio": Rejected(  # backup_optimizer in runtime/zero/stage3.py
            f"{_DEEPSPEED} updates what stays on the GPU by a second optimizer, whose moments no checkpoint holds; "
            "remove it",
            (None, 1, 1.0),
        ),
        "super_offload": Rejected(_UNCOMPARED, (None, False)),
        "cpuadam_cores_perc": FRACTION,
    },
    "offload_param": {
        "device": one_of("none", "cpu", "nvme"),
        "nvme_path": TEXT,
        "buffer_count": COUNT,
        "buffer_size": COUNT,
        "max_in_cpu": NATURAL,
        "pin_memory": BOOLEAN,
    },
    "cpu_offload": _OLD_OFFLOAD,
    "cpu_offload_param": _OLD_OFFLOAD,
    "cpu_offload_use_pin_memory": _OLD_OFFLOAD,
    "stage3_gather_fp16_weights_on_model_save": NoEffect("the export gathers the weights itself, in fp32", BOOLEAN),
    "elastic_checkpoint": _CHECKPOINT,
    "legacy_stage1": NoEffect("the present stage 1 trains the same", BOOLEAN),
    "pipeline_loading_checkpoint": _CHECKPOINT,
    "save_muon_momentum_buffer_in_memory": Rejected("DeepSpeed's Muon is not supported; remove it", (None, False)),
    "zenflow": Rejected("ZenFlow updates with stale gradients, which changes the loss curve; remove it"),
    "zero_quantized_weights": _QUANTISED,
    "zero_quantized_nontrainable_weights": _QUANTISED,
    "zero_quantized_gradients": _QUANTISED,
    "mics_shard_size": Rejected(
        f"{_DEEPSPEED} has removed MiCS; use zero_hpz_partition_size to shard within a node", (None, -1)
    ),
    "mics_hierarchical_params_gather": _removed("MiCS", "use zero_hpz_partition_size to shard within a node"),
    "zeropp_loco_param": _removed("LoCo"),
}

# Names under which DeepSpeed reads a key of zero_optimization, too (populate_by_name in runtime/zero/config.py).
SECOND_NAMES = {
    key.removeprefix("stage3_"): key
    for key in ZERO
    if key.startswith("stage3_") and key != "stage3_gather_fp16_weights_on_model_save"
}

# Of the block "aio", as transformers' documentation still writes it.
OLD_NAMES = {"thread_count": "intra_op_parallelism"}

# The stages that use a key of zero_optimization. Under another stage DeepSpeed accepts it and ignores it.
STAGES = {key: (3,) for key in ZERO if key.startswith("stage3_")} | {
    "offload_param": (3,),
    "zero_hpz_partition_size": (3,),
    "sub_group_size": (3,),
    "memory_efficient_linear": (3,),
    "leaf_module": (3,),
    "offload_optimizer": (1, 2, 3),
    "round_robin_gradients": (1, 2),
}

DEEPSPEED: Table = {
    "train_batch_size": RecipeOwned("batch.global_batch_size", auto=True, values=whole_number),
    "train_micro_batch_size_per_gpu": RecipeOwned("batch.micro_batch_size", auto=True, values=whole_number),
    "gradient_accumulation_steps": RecipeOwned(ACCUMULATION, auto=True, values=whole_number),
    "gradient_clipping": RecipeOwned("optimizer.max_grad_norm", auto=True, values=clipping),
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "bf16": {
        "enabled": RecipeOwned("precision", auto=True, values=enabled("bf16")),
        "immediate_grad_update": BOOLEAN,
        "check_grad_overflow": BOOLEAN,
        "bf16_master_weights_and_grads": _PRECISION,
        "bf16_optimizer_states": _PRECISION,
        **dict.fromkeys(
            ("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
            _LOSS_SCALE,
        ),
    },
    "fp16": {
        "enabled": RecipeOwned("precision", auto=True, values=enabled("fp16")),
        "auto_cast": BOOLEAN,
        "loss_scale": NOT_NEGATIVE,
        "initial_scale_power": _SCALE_POWER,
        "loss_scale_window": COUNT,
        "hysteresis": COUNT,
        "consecutive_hysteresis": BOOLEAN,
        "min_loss_scale": NOT_NEGATIVE,
        "fp16_master_weights_and_grads": _PRECISION,
    },
    "zero_optimization": ZERO,
    "pipeline": {
        "stages": COUNT,
        "partition": _PARTITION,
        "activation_checkpoint_interval": NATURAL,
        "use_reentrant": Rejected(
            "recomputation (the recipe's memory.activation_checkpointing) is never reentrant; remove it",
            (None, False),
        ),
        "pipe_partitioned": _PARTITIONED,
        "grad_partitioned": _PARTITIONED,
        "seed_layers": Rejected("weights are seeded by name, alike under every strategy; remove it", (None, False)),
    },
    "activation_checkpointing": {
        "partition_activations": _RECOMPUTATION,
        "number_checkpoints": _RECOMPUTATION,
        "contiguous_memory_optimization": _RECOMPUTATION,
        "synchronize_checkpoint_boundary": _RECOMPUTATION,
        "profile": _RECOMPUTATION,
        "cpu_checkpointing": _RECOMPUTATION,
    },
    "aio": {
        "block_size": COUNT,
        "queue_depth": COUNT,
        "intra_op_parallelism": COUNT,
        "single_submit": BOOLEAN,
        "overlap_events": BOOLEAN,
        "use_gds": BOOLEAN,
    },
    "communication_data_type": DTYPE,
    "data_types": {
        "grad_accum_dtype": DTYPE,
        "param_dtype": RecipeOwned("precision", values=read_as(DTYPE)),
        "buffer_dtype": RecipeOwned("precision", values=read_as(DTYPE)),
        "keep_in_fp32_modules": or_auto(TEXTS),
    },
    "prescale_gradients": BOOLEAN,
    "gradient_predivide_factor": ValueRule("a number above 0", lambda value: NUMBER.accepts(value) and value > 0),
    "gradient_allreduce_op": one_of("mean"),
    "disable_allgather": BOOLEAN,
    "disable_python_gc": NoEffect("the recipe's memory.garbage_collection_steps sets this", BOOLEAN),
    "zero_allow_untested_optimizer": NoEffect("always on: the optimizer is made by the training loop", BOOLEAN),
    "zero_force_ds_cpu_optimizer": BOOLEAN,
    "steps_per_print": _OWN_LINES,
    "log_level": TEXT,
    "dump_state": BOOLEAN,
    "wall_clock_breakdown": _OWN_LINES,
    "memory_breakdown": BOOLEAN,
    "comms_logger": {"enabled": BOOLEAN, "prof_all": BOOLEAN, "prof_ops": TEXTS, "verbose": BOOLEAN, "debug": BOOLEAN},
    "flops_profiler": {
        "enabled": BOOLEAN,
        "recompute_fwd_factor": NOT_NEGATIVE,
        "profile_step": COUNT,
        "module_depth": NUMBER,
        "top_modules": COUNT,
        "detailed": BOOLEAN,
        "output_file": optional(TEXT),
    },
    "timers": {"throughput": {"enabled": BOOLEAN, "synchronized": BOOLEAN}},
    "tensorboard": _MONITOR,
    "wandb": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "monitor_config": NoEffect(_MONITOR.reason, foreign=True),
    "torch_autocast": Rejected("the recipe's precision decides what is cast; remove it"),
    **dict.fromkeys(("comms_config", "cuda_visible_devices", "log"), _READ_NOWHERE),
    "bfloat16": NoEffect("the old name of bf16"),
    "checkpoint": _CHECKPOINT,
    "datastates_ckpt": _CHECKPOINT,
    "dataloader_drop_last": NoEffect("every step is a complete global batch, so nothing is dropped", BOOLEAN),
    "managed_gradient_accumulation": Rejected(
        "the training loop accumulates up to the global batch itself; remove it", (None, True)
    ),
    "vocabulary_size": NoEffect("the tokenizer sets the size, and DeepSpeed only warns about it"),
    "data_efficiency": Rejected("it changes the data that the recipe chose; remove it"),
    "hybrid_engine": Rejected("it serves generation during training (RLHF), which is not supported; remove it"),
    "autotuning": Rejected("it starts runs other than the recipe's; remove it"),
    "compile": NoEffect("only DeepSpeed's engine.compile() reads it; the recipe's compile compiles", _PLAIN_COMPILE),
    "tensor_parallel": _TENSOR_PARALLEL,
    "sequence_parallel_size": Rejected(_SEQUENCE, (None, 1)),
    "seq_parallel_communication_data_type": NoEffect("only sequence_parallel_size above 1 makes DeepSpeed read it"),
    "expert_parallel": _EXPERTS,
    "use_data_before_expert_parallelism": _EXPERTS,
    "weight_quantization": Rejected("quantised weights change the training result; remove it"),
    "nebula": _removed("Nebula checkpoints"),
    "compression_training": _removed("the compression library, so nothing would be compressed"),
    "amp": _removed("Apex AMP", "use the recipe's precision"),
    "quantize_training": _removed("mixture-of-quantization"),
    "sparse_gradients": _removed("sparse gradients and would reduce them dense"),
    "eigenvalue": _removed("the eigenvalue block"),
    "sparse_attention": _removed("sparse attention"),
    "elasticity": _removed("elastic training", "remove it: the recipe's global_batch_size fits any world size"),
    "graph_harvesting": _removed("graph harvesting"),
    "curriculum_learning": _removed("the old curriculum block"),
    "progressive_layer_drop": _removed("progressive layer dropping"),
}
