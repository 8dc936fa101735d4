"""The keys of an Accelerate YAML and how each is treated, with the rule types that deepspeed_keys.py shares.

A table maps a key to another table (a block of keys) or to one of four rules: `ValueRule` (used, after a check),
`RecipeOwned` (the file's value counts where the recipe gives none), `NoEffect` (known, and changes nothing here) or
`Rejected` (would change the run, and is not built). strategy/translation.py applies them, and docs/strategy_keys.md
lists them (scripts/pages/strategy_keys.py). Names are those of accelerate 1.15 and deepspeed 0.19; a test compares the
tables with the installed versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samecurve.specs.environment import dated
from samecurve.strategy.timetables import SCHEDULES


@dataclass(frozen=True)
class ValueRule:
    expected: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class RecipeOwned:
    """The key means what the recipe's key `by` means. Where the recipe does not give that, the file's value counts.

    Attributes:
        auto: whether "auto" leaves the value to the recipe.
        values: returns, for a value of the file, the values of `by` that agree with it, the preferred one first;
            raises ValueError with the rest of a message that begins with the value.
        defaults: values that tools write without being asked; a value that the recipe gives counts before them.
    """

    by: str
    auto: bool = False
    values: Callable[[Any], tuple] = lambda value: (value,)
    defaults: tuple = ()

    def refusal(self, value: Any) -> str:
        """The message of `values`' ValueError, "" if it takes the value."""
        try:
            self.values(value)
        except ValueError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class NoEffect:
    """A known key that changes nothing here; the header lists it.

    Attributes:
        rule: the values that change nothing; others are problems.
        silent: values that say what happens anyway, which the header does not list.
        foreign: whether the installed library does not read the key either, though public files have it.
    """

    reason: str
    rule: ValueRule = ValueRule("any value", lambda value: True)
    silent: tuple = ()
    foreign: bool = False


@dataclass(frozen=True)
class Rejected:
    """A key that would change the run and is not built. `harmless`: values that enable nothing, as `NoEffect`'s."""

    reason: str
    harmless: tuple = (None,)


Table = dict[str, Any]


def _whole(value: Any) -> bool:
    # JSON files write sizes as 5e8, which DeepSpeed converts to an integer.
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def one_of(*choices: Any) -> ValueRule:
    shown = ", ".join(str(choice) for choice in choices)
    # True == 1 for Python, so that `stage: true` would pass for stage 1
    return ValueRule(f"one of {shown}", lambda value: not isinstance(value, bool) and value in choices)


def only(value: bool, reason: str) -> ValueRule:
    return ValueRule(f"{str(value).lower()}: {reason}", lambda setting: setting is value)


def optional(kind: ValueRule) -> ValueRule:
    return ValueRule(f"null or {kind.expected}", lambda value: value is None or kind.accepts(value))


def or_auto(kind: ValueRule) -> ValueRule:
    return ValueRule(f'"auto" or {kind.expected}', lambda value: value == "auto" or kind.accepts(value))


BOOLEAN = ValueRule("true or false", lambda value: isinstance(value, bool))
COUNT = ValueRule("an integer above 0", lambda value: _whole(value) and value > 0)
NATURAL = ValueRule("an integer of at least 0", lambda value: _whole(value) and value >= 0)
NUMBER = ValueRule("a number", _number)
NOT_NEGATIVE = ValueRule("a number of at least 0", lambda value: _number(value) and value >= 0)
FRACTION = ValueRule("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1)
PORT = ValueRule("a port from 0 to 65535", lambda value: _whole(value) and 0 <= value < 2**16)
TEXT = ValueRule("text", lambda value: isinstance(value, str) and value != "")
TEXTS = ValueRule(
    "a list of strings", lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value)
)
GPU_IDS = ValueRule('"all" or comma-separated numbers', lambda value: isinstance(value, str) or NATURAL.accepts(value))
DTYPE = one_of("fp32", "bf16", "fp16")

# What a file calls gradient_accumulation_steps: in the recipe it follows from two sizes and the number of processes.
ACCUMULATION = "batch.global_batch_size / batch.micro_batch_size"


def read_as(rule: ValueRule, convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], tuple]:
    """Return a reader of a file's value as a recipe key's, see `RecipeOwned.values`. Raises ValueError by the rule."""

    def read(value: Any) -> tuple:
        if not rule.accepts(value):
            raise ValueError(f"expected {rule.expected}")
        return (convert(value),)

    return read


whole_number, number = read_as(COUNT, int), read_as(NUMBER)
clipping = read_as(NOT_NEGATIVE, lambda norm: float(norm) or 1e9)  # DeepSpeed's 0 clips nothing, as no gradient's norm


def _mixed_precision(value: Any) -> tuple:
    if value in ("fp16", "bf16"):
        return (value,)
    if value in ("no", False):  # YAML reads a bare no as false
        return ("fp32",)
    if value == "fp8":
        raise ValueError("FP8 is set by the recipe's key fp8; remove it")
    raise ValueError("expected one of no, fp16, bf16")


def enabled(precision: str) -> Callable[[Any], tuple]:
    """The values of the recipe's precision that agree with an `enabled` of this precision, see `RecipeOwned.values`."""

    def agreeing(value: Any) -> tuple:
        if not isinstance(value, bool):
            raise ValueError('expected true, false or "auto"')
        return (precision,) if value else tuple(other for other in ("bf16", "fp32", "fp16") if other != precision)

    return agreeing


def _recomputation(value: Any) -> tuple:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    # false is of Accelerate's own recomputation, and says nothing about the recipe's
    return ("full",) if value else ("none", "full", "selective", "every_n_layers", "offload")


def _compile(value: Any) -> tuple:
    if str(value).lower() in ("no", "false"):  # not compiled by Accelerate, which says nothing about the recipe
        return ("off", "auto", "regional", "full")
    if str(value).lower() != "inductor":
        raise ValueError("expected NO or INDUCTOR")
    return ("full", "regional")


def _compiled_layers(value: Any) -> tuple:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return ("regional",) if value else ("full", "off", "auto", "regional")


_TPU = NoEffect("only TPUs read it, and distributed_type names none", silent=(False, "no", "", []))
_DEVICE = one_of("none", "cpu", "nvme")
_WORLD = "weights are the same on every rank from the start"
_ROWS = NoEffect("rows of any length are split")
_BACKEND = RecipeOwned("compile", values=_compile)
_COMPILED = NoEffect("the recipe's compile decides how", BOOLEAN, silent=(False,))

# Keys of Accelerate's YAML that only samecurve reads: Accelerate ignores unknown nested keys. fsdp_forward_prefetch is
# not among them, although Accelerate reads that key under FSDP1 alone.
OURS = (
    "fsdp_reduce_dtype",
    "parallelism_config_tp_sequence_parallel",
    "parallelism_config_pp_size",
    "parallelism_config_pp_schedule",
    "parallelism_config_ep_size",
)

ACCELERATE: Table = {
    "compute_environment": one_of("LOCAL_MACHINE"),
    "distributed_type": ValueRule(
        "one of NO, MULTI_GPU (also for CPUs), FSDP, DEEPSPEED",
        lambda value: value in ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED"),
    ),
    "num_processes": COUNT,
    "num_machines": COUNT,
    "machine_rank": NATURAL,
    "main_process_ip": optional(TEXT),
    "main_process_port": optional(PORT),
    "main_training_function": TEXT,
    "rdzv_backend": TEXT,
    "same_network": BOOLEAN,
    "gpu_ids": optional(GPU_IDS),
    "enable_cpu_affinity": BOOLEAN,
    "debug": BOOLEAN,
    "use_cpu": only(
        False, "true turns FSDP and DeepSpeed off; to hide the GPUs from a run, start it with CUDA_VISIBLE_DEVICES="
    ),
    "mixed_precision": RecipeOwned("precision", values=_mixed_precision, defaults=("no", False)),
    "fp16": RecipeOwned("precision", values=enabled("fp16")),
    "fp8_config": Rejected("FP8 is set by the recipe's key fp8; remove it", (None, {})),
    "dynamo_backend": _BACKEND,
    "dynamo_config": {
        "dynamo_backend": _BACKEND,
        "dynamo_mode": Rejected("only the default mode is built; remove it", (None, "default")),
        "dynamo_use_fullgraph": _COMPILED,
        "dynamo_use_dynamic": _COMPILED,
        "dynamo_use_regional_compilation": RecipeOwned("compile", values=_compiled_layers),
    },
    "megatron_lm_config": Rejected("Megatron-LM is not supported; remove it", (None, {})),
    "mpirun_config": Rejected("processes are started by torchrun, not by MPI; remove it", (None, {})),
    "ipex_config": NoEffect("PyTorch has what Intel's extension added", foreign=True),
    "downcast_bf16": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    "fsdp_config": {
        # translation.py has made FSDP1's keys FSDP2's
        "fsdp_version": ValueRule("1 or 2, which FSDP2 both trains", lambda value: value == 2),
        "fsdp_reshard_after_forward": BOOLEAN,
        "fsdp_reduce_dtype": one_of("fp32", "bf16"),
        "fsdp_forward_prefetch": BOOLEAN,
        "fsdp_backward_prefetch": NoEffect(
            "FSDP2 always gathers the next layer ahead in the backward pass",
            optional(one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", 1, 2)),
        ),
        "fsdp_backward_prefetch_policy": NoEffect("an old name of fsdp_backward_prefetch", foreign=True),
        "fsdp_auto_wrap_policy": one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "fsdp_transformer_layer_cls_to_wrap": TEXT,
        "fsdp_min_num_params": NATURAL,
        "fsdp_offload_params": BOOLEAN,
        "fsdp_state_dict_type": NoEffect(
            "checkpoints have a format of their own, which every strategy reads",
            one_of("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"),
        ),
        "fsdp_cpu_ram_efficient_loading": NoEffect("each rank loads only its own shards", BOOLEAN, silent=(False,)),
        "fsdp_activation_checkpointing": RecipeOwned("memory.activation_checkpointing", values=_recomputation),
        "fsdp_activation_checkpointing_offload": Rejected(
            "the recipe sets this, by memory.activation_checkpointing: offload; remove it", (None, False)
        ),
        "fsdp_sharding_strategy": one_of(
            "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"
        ),
        "fsdp_use_orig_params": NoEffect("FSDP2 always keeps the model's own parameters", BOOLEAN),
        "fsdp_sync_module_states": NoEffect(_WORLD, BOOLEAN),
        "fsdp_ignored_modules": Rejected(
            "the gradients of ignored modules would not be summed over the ranks; remove it"
        ),
        "fsdp_limit_all_gathers": NoEffect("FSDP2 always limits them", BOOLEAN, foreign=True),
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": COUNT,
        "parallelism_config_dp_shard_size": COUNT,
        "parallelism_config_tp_size": COUNT,
        "parallelism_config_cp_size": COUNT,
        "parallelism_config_cp_backend": Rejected(
            f"context_parallel of {dated('torch')} drops the masks between packed documents, so samecurve has its own; "
            "remove it",
            (None, "torch"),
        ),
        "parallelism_config_cp_comm_strategy": one_of("allgather", "alltoall"),  # the second is a ring
        "parallelism_config_sp_size": COUNT,
        "parallelism_config_sp_backend": NoEffect(
            f"Ulysses of {dated('deepspeed')} drops the masks between packed documents, so samecurve has its own",
            one_of("deepspeed"),
        ),
        "parallelism_config_sp_seq_length": _ROWS,
        "parallelism_config_sp_seq_length_is_variable": _ROWS,
        "parallelism_config_sp_attn_implementation": NoEffect("the recipe's model.attention decides"),
        "parallelism_config_tp_sequence_parallel": BOOLEAN,
        "parallelism_config_pp_size": ValueRule("an integer above 1", lambda value: _whole(value) and value > 1),
        "parallelism_config_pp_schedule": one_of(*SCHEDULES),
        "parallelism_config_ep_size": COUNT,
    },
    "deepspeed_config": {
        "deepspeed_config_file": TEXT,
        "deepspeed_hostfile": TEXT,
        "deepspeed_exclusion_filter": TEXT,
        "deepspeed_inclusion_filter": TEXT,
        "deepspeed_multinode_launcher": one_of("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"),
        "zero3_init_flag": BOOLEAN,
        "gradient_accumulation_steps": RecipeOwned(ACCUMULATION, auto=True, values=whole_number),
        "gradient_clipping": RecipeOwned("optimizer.max_grad_norm", auto=True, values=clipping),
        "zero_stage": one_of(0, 1, 2, 3),
        "offload_optimizer_device": _DEVICE,
        "offload_param_device": _DEVICE,
        "offload_optimizer_nvme_path": TEXT,
        "offload_param_nvme_path": TEXT,
        "zero3_save_16bit_model": NoEffect("the export gathers the weights itself, in fp32", BOOLEAN),
        "deepspeed_moe_layer_cls_names": TEXT,
        "seq_parallel_communication_data_type": NoEffect("only DeepSpeed's JSON has this key", foreign=True),
    },
}
# Keys from which a DeepSpeed JSON is made where the YAML names none, and their places in it.
INLINE = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "deepspeed_moe_layer_cls_names": ("zero_optimization", "leaf_module", "classes"),
}
