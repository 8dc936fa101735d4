"""From a plan to processes and an engine. The one place that chooses an engine by the strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from samecurve.distributed.affinity import affinity_advice, read_cpu_binding
from samecurve.engines.accelerator import start
from samecurve.engines.torch_engine import TorchEngine
from samecurve.engines.verify import verify
from samecurve.strategy.preflight import allocator_settings, check_room

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan, Strategy

__all__ = ["allocator", "build", "core_advice", "device_name", "start"]


def build(accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task) -> Engine:
    """The strategy's engine around the architecture `skeleton`, weights filled in and checked against the plan."""
    check_room(plan.strategy, sum(parameter.numel() for parameter in skeleton.parameters()))
    # DeepSpeed takes seconds to import, and what does not use it runs without it
    if plan.strategy.family == "pipeline":
        from samecurve.engines.pipeline import PipelineEngine

        engine = PipelineEngine(accelerator, plan, skeleton, task)
    elif plan.strategy.family == "zero":
        from samecurve.engines.zero import ZeroEngine

        engine = ZeroEngine(accelerator, plan, skeleton, task)
    else:
        engine = TorchEngine(accelerator, plan, skeleton, task)
    verify(plan, engine.describe())
    return engine


def device_name(accelerator: Accelerator) -> str:
    """The kind of device that this process trains on, as its maker calls it."""
    return torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type


def allocator(accelerator: Accelerator) -> str:
    """How PyTorch allocates this process's device memory, as its environment says; "" on a CPU."""
    return allocator_settings() if accelerator.device.type == "cuda" else ""


def core_advice(accelerator: Accelerator, strategy: Strategy, world: ControlGroup) -> str:
    """A line for the user where processes of one host are in each other's way, "" otherwise. Collective."""
    on_gpu = accelerator.device.type == "cuda"
    return affinity_advice(
        world.all_gather_object(read_cpu_binding(torch.get_num_threads())), strategy.launcher, on_gpu
    )
