"""The only place where strategy words live: `plan` resolves, `start` makes the Accelerator, `build` the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from ..tasks import Task
    from .base import Engine
    from .resolve import Plan


def plan(argv: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Command line and environment -> the recipe and the strategy, or one report of all problems. Loads no torch."""
    from .preflight import check
    from .resolve import resolve

    resolved = resolve(argv, environ)
    check(resolved, environ)
    return resolved


def start(plan: Plan) -> Accelerator:
    """Processes, devices, precision and trackers of the plan. Raises TopologyError when the world is another one."""
    from .start import start as start_accelerator

    return start_accelerator(plan)


def build(accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task) -> Engine:
    """The strategy's engine around the architecture `skeleton`, weights filled in and checked against the plan."""
    from .preflight import check_room
    from .verify import verify

    _check_same_data(accelerator, task)
    check_room(plan.strategy, sum(parameter.numel() for parameter in skeleton.parameters()))
    if plan.strategy.family == "pipeline":
        from .pipeline import PipelineEngine as Chosen
    elif plan.strategy.family == "zero":
        from .zero import ZeroEngine as Chosen
    else:
        from .accelerated import AcceleratedEngine as Chosen
    engine = Chosen(accelerator, plan, skeleton, task)
    verify(plan, engine.describe())
    return engine


def _check_same_data(accelerator: Accelerator, task: Task) -> None:
    """Raises DataError when machines read different rows: another file, or another Python's standard library."""
    from accelerate.utils import gather_object

    from ..errors import DataError

    own = (task.train.fingerprint, task.held_out.fingerprint if task.held_out else "", task.vocabulary_size)
    for rank, other in enumerate(gather_object([own]) if accelerator.num_processes > 1 else []):
        if other != own:
            raise DataError(
                f"process {accelerator.process_index} reads other data than process {rank} (rows or tokenizer differ: "
                f"{own} and {other}); give every machine the same files"
            )


def device_name(accelerator: Accelerator) -> str:
    """The kind of device that this process trains on, as its maker calls it."""
    import torch

    return torch.cuda.get_device_name() if accelerator.device.type == "cuda" else accelerator.device.type
