"""Choice and construction of the engine for a plan's strategy; the only place that maps a strategy to an engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from samecurve.distributed.affinity import affinity_advice, load_advice, read_cpu_binding
from samecurve.engines.start import build_accelerator
from samecurve.engines.torch_engine import TorchEngine
from samecurve.engines.verify import verify
from samecurve.models import fp32_weights
from samecurve.models.quantized import stored_shapes
from samecurve.optim import own
from samecurve.specs.data_names import is_import_path
from samecurve.strategy.preflight import allocator_settings, check_room

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan

__all__ = ["allocator", "build", "busy_advice", "build_accelerator", "core_advice", "device_name"]


def build(accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task) -> Engine:
    """Build the strategy's engine, load the weights and verify the engine.

    Args:
        skeleton: the architecture, on the meta device with full shapes.

    Raises:
        TopologyError: the live engine differs from the plan (see `verify`).
        StorageError: an NVMe folder is too small for the offloaded state (see check_room).
        ConfigurationError: the strategy cannot train this model, or cannot use an optimizer of the user's own.
    """
    if is_import_path(plan.recipe.optimizer.name):
        own.check(plan.recipe.optimizer, shards=plan.strategy.shards_model or plan.strategy.backend == "deepspeed")
    check_room(plan.strategy, sum(parameter.numel() for parameter in skeleton.parameters()))
    # DeepSpeed takes seconds to import, torch's pipelining a tenth of one; DeepSpeed may be missing under the others
    if plan.strategy.torch_schedule:
        from samecurve.engines.torch_pipeline import TorchPipelineEngine

        engine = TorchPipelineEngine(accelerator, plan, skeleton, task)
    elif plan.strategy.backend == "torch":
        engine = TorchEngine(accelerator, plan, skeleton, task)
    elif plan.strategy.schedule:
        from samecurve.engines.deepspeed_pipeline import DeepSpeedPipelineEngine

        engine = DeepSpeedPipelineEngine(accelerator, plan, skeleton, task)
    else:
        from samecurve.engines.zero import ZeroEngine

        engine = ZeroEngine(accelerator, plan, skeleton, task)
    kept = fp32_weights.names(skeleton, plan.recipe.precision) if plan.strategy.shards_model else set()
    shapes = stored_shapes(skeleton, plan.recipe)
    whole = sum(shape.numel() for name, shape in shapes.items() if name in kept)
    verify(plan, engine.describe(), (shape for name, shape in shapes.items() if name not in kept), whole)
    return engine


def device_name(accelerator: Accelerator) -> str:
    """Name of this process's device: the vendor's product name for a GPU, else the device type."""
    return torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type


def allocator(accelerator: Accelerator) -> str:
    """Settings of PyTorch's device memory allocator from the environment; "" on a CPU."""
    return allocator_settings() if accelerator.device.type == "cuda" else ""


def busy_advice(accelerator: Accelerator) -> str:
    """Advice to print if other programs slow this run's CPU threads down, "" otherwise."""
    if accelerator.device.type == "cuda":
        return ""
    return load_advice(read_cpu_binding(torch.get_num_threads()), os.getloadavg()[0])


def core_advice(world: ControlGroup) -> str:
    """Advice to print if processes on one host compete for CPU cores, "" otherwise. Collective."""
    return world.conclude(read_cpu_binding(torch.get_num_threads()), affinity_advice)
