"""The only place where strategy words live: `plan` resolves, `start` makes the Accelerator, `build` the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from samecurve.errors import SamecurveError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan, Strategy


def plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Command line and environment -> the recipe and the strategy, or one report of all problems. Loads no torch."""
    from samecurve.strategy.preflight import check_machine
    from samecurve.strategy.resolve import resolve_plan

    resolved = resolve_plan(argv, environ)
    try:
        check_machine(resolved, environ)
    except SamecurveError as error:
        error.output_dir = resolved.recipe.output_dir
        raise
    return resolved


def start(plan: Plan) -> Accelerator:
    """Processes, devices, precision and trackers of the plan. Raises TopologyError when the world is another one."""
    from samecurve.engines.accelerator import start as start_accelerator

    return start_accelerator(plan)


def build(accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task) -> Engine:
    """The strategy's engine around the architecture `skeleton`, weights filled in and checked against the plan."""
    from samecurve.engines.verify import verify
    from samecurve.strategy.preflight import check_room

    check_room(plan.strategy, sum(parameter.numel() for parameter in skeleton.parameters()))
    if plan.strategy.family == "pipeline":
        from samecurve.engines.pipeline import PipelineEngine as Chosen
    elif plan.strategy.family == "zero":
        from samecurve.engines.zero import ZeroEngine as Chosen
    else:
        from samecurve.engines.accelerate_engine import AcceleratedEngine as Chosen
    engine = Chosen(accelerator, plan, skeleton, task)
    verify(plan, engine.describe())
    return engine


def device_name(accelerator: Accelerator) -> str:
    """The kind of device that this process trains on, as its maker calls it."""
    import torch

    return torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type


def allocator(accelerator: Accelerator) -> str:
    """How PyTorch allocates this process's device memory, as its environment says; "" on a CPU."""
    from samecurve.strategy.preflight import allocator_settings

    return allocator_settings() if accelerator.device.type == "cuda" else ""


def core_advice(accelerator: Accelerator, strategy: Strategy, world: ControlGroup) -> str:
    """A line for the user where processes of one host are in each other's way, "" otherwise. Collective."""
    import torch

    from samecurve.distributed.affinity import affinity_advice, read_cpu_binding

    on_gpu = accelerator.device.type == "cuda"
    return affinity_advice(
        world.all_gather_object(read_cpu_binding(torch.get_num_threads())), strategy.launcher, on_gpu
    )
