"""One Accelerator per process, whatever started it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
    ProjectConfiguration,
    set_seed,
)

from ..errors import TopologyError
from . import launch, rehearsal
from .deepspeed_config import concrete

if TYPE_CHECKING:
    from .resolve import Plan

_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def start(plan: Plan) -> Accelerator:
    """Raises TopologyError when Accelerate made another world than the plan's."""
    strategy, recipe = plan.strategy, plan.recipe
    launch.adopt(strategy)
    if rehearsal.needed():
        rehearsal.prepare(strategy)
    accelerator = Accelerator(
        mixed_precision="no" if recipe.precision == "fp32" else recipe.precision,
        # the loop hands over a whole step's micro-batches, so Accelerate has nothing to count
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(backend=rehearsal.backend(strategy))],
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=recipe.output_dir, logging_dir=recipe.output_dir),
        **_plugins(plan),
    )
    set_seed(recipe.seed, device_specific=True)  # of dropout only; weights and rows have generators of their own
    if rehearsal.needed():
        rehearsal.adjust(accelerator, recipe.precision)
        rehearsal.check(accelerator, strategy)
    if accelerator.num_processes != strategy.world_size:
        raise TopologyError(
            f"{strategy.world_size} processes were asked for, but Accelerate made a world of "
            f"{accelerator.num_processes} ({accelerator.distributed_type}): start them with accelerate "
            "launch, torchrun or deepspeed"
        )
    return accelerator


def _plugins(plan: Plan) -> dict:
    strategy = plan.strategy
    if strategy.family in ("zero", "pipeline"):
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=concrete(plan))}
    if strategy.family != "fsdp":
        return {}
    plugins: dict = {"fsdp_plugin": FullyShardedDataParallelPlugin(mixed_precision_policy=_fsdp_policy(plan))}
    if strategy.replicate_size > 1:
        plugins["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=strategy.replicate_size, dp_shard_size=strategy.world_size // strategy.replicate_size
        )
    return plugins


def _fsdp_policy(plan: Plan):
    """Compute in the recipe's precision, but reduce gradients and return logits in fp32.

    Accelerate's own policy reduces and returns in bf16, which costs the loss its last digits.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=_DTYPE.get(plan.recipe.precision), reduce_dtype=torch.float32, output_dtype=torch.float32
    )
