"""Queries to a live DeepSpeed engine, shared by ZeRO and pipelines, how a ZeRO-3 model is partitioned, and values that
a script's DeepSpeed file may leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from torch import distributed as dist
from torch.utils.data import DataLoader

from samecurve.interfaces.engine import dtype_name

if TYPE_CHECKING:
    import deepspeed
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from torch import nn


def precision(engine: deepspeed.DeepSpeedEngine) -> str:
    """Report the compute precision: fp32, bf16 or fp16."""
    if engine.bfloat16_enabled():
        return "bf16"
    return "fp16" if engine.fp16_enabled() else "fp32"


def numbers(engine: deepspeed.DeepSpeedEngine) -> dict:
    """Collect the fields of EngineDescription that DeepSpeed reports."""
    reduced = engine.communication_data_type
    return {
        "optimizer": type(engine.optimizer).__name__,
        "precision": precision(engine),
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "gradient_clipping": engine.gradient_clipping(),
        "reduce_dtype": dtype_name(reduced) if reduced else None,
        "zero_stage": int(engine.zero_optimization_stage()),
    }


@cache
def read_models_whole() -> None:
    """Let transformers' from_pretrained read whole models from now on, also in one process alone.

    Under ZeRO-3 it divides a model over all processes, and waits for those that do not read it: forever where the main
    process of a script reads back what was trained.
    """
    from transformers import PreTrainedModel, modeling_utils

    read = PreTrainedModel.from_pretrained.__func__  # pyright: ignore[reportFunctionMemberAccess]

    @wraps(read)
    def read_whole(*args: Any, **kwargs: Any) -> Any:
        is_enabled = modeling_utils.is_deepspeed_zero3_enabled
        modeling_utils.is_deepspeed_zero3_enabled = lambda: False
        try:
            return read(*args, **kwargs)
        finally:
            modeling_utils.is_deepspeed_zero3_enabled = is_enabled

    PreTrainedModel.from_pretrained = classmethod(read_whole)  # pyright: ignore[reportAttributeAccessIssue]


def link_masters(engine: deepspeed.DeepSpeedEngine) -> None:
    """Link each weight with its place in ZeRO-1's and 2's flat fp32 masters, also under round_robin_gradients.

    That key reorders the weights in the flat groups, but DeepSpeed links masters by the reordered offsets only where a
    weight is padded (_link_all_hp_params in runtime/zero/stage_1_and_2.py, 0.19.8). Whatever reads or writes a master
    through its weight, such as safe_set_full_fp32_param, would use another weight's place.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import link_hp_params

    zero = engine.optimizer
    if not isinstance(zero, DeepSpeedZeroOptimizer) or not zero.round_robin_gradients:
        return
    for index, weights in enumerate(zero.bit16_groups):
        reordered = zip(zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index], strict=True)
        offsets = {id(weight): offset for weight, offset in reordered}
        group = zero.real_dp_process_group[index]
        size = zero.bit16_groups_flat[index].numel() // dist.get_world_size(group)
        link_hp_params(
            lp_param_list=weights,
            flat_hp_partition=zero.single_partition_of_fp32_groups[index],
            gradient_dict=zero.averaged_gradients,
            offload_gradient_dict=zero.offload_gradient_dict,
            use_offload=zero.cpu_offload,
            param_group_index=index,
            partition_start=dist.get_rank(group) * size,
            partition_size=size,
            dp_group=group,
            param_offsets=[offsets[id(weight)] for weight in weights],
        )


def drop_gradients(engine: deepspeed.DeepSpeedEngine) -> None:
    """Forget what ZeRO-1 and 2 keep of an unfinished step's gradients beside that which `zero_grad` clears.

    As DeepSpeed does at an overflow (DeepSpeedZeroOptimizer.step in runtime/zero/stage_1_and_2.py, 0.19.8). ZeRO-3's
    `zero_grad` sets micro_step_id to 0, and the next gradients replace those that it keeps (stage3.py).
    """
    from deepspeed.runtime.zero import stage_1_and_2

    zero: Any = engine.optimizer
    if not isinstance(zero, stage_1_and_2.DeepSpeedZeroOptimizer):
        return
    zero.micro_step_id = stage_1_and_2.INITIAL_MICRO_STEP_ID  # on the CPU the next gradients replace those before
    if zero.cpu_offload:
        zero._offload_accumulated_param_ids = set()
        zero.reset_cpu_buffers()
    zero._release_preflattened_grad_buffers()
    for group in zero.averaged_gradients:
        zero.averaged_gradients[group] = None
    for group in zero.all_grad_tensors:
        zero.all_grad_tensors[group] = None


def may_rescale(engine: deepspeed.DeepSpeedEngine) -> bool:
    """Whether a smaller fp16 loss scale may cure an overflow: DeepSpeed then skips the step and lowers the scale."""
    scaler = dynamic_scaler(engine)
    return scaler is not None and scaler.cur_scale > scaler.min_scale


def skip_at_smallest_scale(engine: deepspeed.DeepSpeedEngine) -> None:
    """Make an overflow at fp16's smallest loss scale skip the step, like any other overflow.

    By default DeepSpeed raises a bare Exception there, before it has discarded the step's gradients
    (runtime/fp16/loss_scaler.py in 0.19.8).
    """
    scaler = dynamic_scaler(engine)
    if scaler is not None:
        scaler.raise_error_at_min_scale = False


def grow_after_step(engine: deepspeed.DeepSpeedEngine) -> Callable[[], None] | None:
    """Make fp16's loss scale double between two steps instead of within one.

    DeepSpeed 0.19.8 doubles the scale in the middle of a step, before it divides the gradients by the scale
    (runtime/zero/stage_1_and_2.py, stage3.py): that step applies half of its gradient.

    Returns:
        The function to call after each applied step; None without a dynamic scale.
    """
    scaler = dynamic_scaler(engine)
    if scaler is None:
        return None
    update = scaler.update_scale
    scaler.update_scale = lambda overflow: update(overflow) if overflow else None
    return lambda: update(overflow=False)


_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def loss_scale_state(engine: deepspeed.DeepSpeedEngine) -> dict:
    """Read the dynamic loss scale in LossScale's format and, for an exact resume, in DeepSpeed's; {} without one."""
    scaler = dynamic_scaler(engine)
    if scaler is None:
        return {}
    # modulo, because DeepSpeed goes on counting when it doubles the scale, which it does one step after the window
    good_steps = scaler.cur_iter - 1 - scaler.last_overflow_iter
    good_steps = (good_steps - 1) % scaler.scale_window + 1 if good_steps > 0 else 0
    own = {name: getattr(scaler, name) for name in _SCALER}
    return {"value": float(scaler.cur_scale), "good_steps": good_steps, "deepspeed": own}


def set_loss_scale(engine: deepspeed.DeepSpeedEngine, values: dict) -> None:
    """Restore a loss scale from `loss_scale_state` of any strategy's engine."""
    scaler = dynamic_scaler(engine)
    if not values or scaler is None:
        return
    # as after an overflow in iteration 0 and `good_steps` without one
    own = {"cur_scale": values["value"], "cur_iter": values["good_steps"] + 1, "last_overflow_iter": 0}
    for name, value in values.get("deepspeed", own).items():
        setattr(scaler, name, value)


def dynamic_scaler(engine: deepspeed.DeepSpeedEngine) -> DynamicLossScaler | None:
    """Return the dynamic loss scaler of fp16; None in another precision or with a fixed scale."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)  # not every optimizer of DeepSpeed has one
    return scaler if engine.fp16_enabled() and getattr(scaler, "dynamic", False) else None


def zero3_init(config: Mapping[str, Any], module: nn.Module | None = None) -> deepspeed.zero.Init:
    """Make the context in which a ZeRO-3 model is built, or divide the weights that `module` has already.

    DeepSpeed creates hpZ's process group once per process. A second model, such as a teacher, has to get that group.
    """
    import deepspeed  # installed only where it is used
    from deepspeed.utils import groups

    group = groups._get_zero_param_intra_parallel_group()
    return deepspeed.zero.Init(module, config_dict_or_path=config, zero_param_parallel_group=group)


def secondary_partition(module: nn.Module) -> int:
    """Return the number of ranks over which a second copy of the weights is sharded, 1 without one."""
    weight: Any = next(module.parameters())
    has_copy = getattr(weight, "ds_zero_param_process_group", None) is not None
    return weight.ds_secondary_tensor_group_size if has_copy else 1


def complete_config(plugin: Any, model: nn.Module, prepared: tuple, num_processes: int) -> None:
    """Set values of a DeepSpeed file for which Accelerate wants what a script need not have."""
    config = plugin.deepspeed_config
    if config.get("zero_optimization", {}).get("stage") == 3:  # else get_state_dict and save_model fail after training
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if plugin.is_auto("train_micro_batch_size_per_gpu"):  # which DeepSpeed only reports
        sizes = [part.batch_size or 1 for part in prepared if isinstance(part, DataLoader)]
        config["train_micro_batch_size_per_gpu"] = max(1, min(sizes, default=1) // num_processes)
    if plugin.is_auto("gradient_clipping"):
        config["gradient_clipping"] = 0.0  # for Accelerate 1.0: a loop that does not clip would be clipped here alone
    if not hasattr(getattr(model, "config", None), "hidden_size"):
        zero = config.get("zero_optimization", {})
        for key in [key for key in zero if plugin.is_auto(f"zero_optimization.{key}")]:
            del zero[key]  # DeepSpeed's default counts: Accelerate's own values are functions of hidden_size
