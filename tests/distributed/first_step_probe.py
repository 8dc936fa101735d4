"""Run under a launcher with train.py's arguments: a first step as it should be, then one with each planted difference.

Prints one JSON line on rank 0: what every engine's check of its first step said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator

import torch

from samecurve.accelerator import deepspeed_introspection
from samecurve.data.batches import StepBatches
from samecurve.engines import factory, first_step
from samecurve.errors import TopologyError
from samecurve.interfaces.sharded_state import WEIGHT
from samecurve.models.skeleton import build_skeleton
from samecurve.optim.dtensor import to_local
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry


@contextlib.contextmanager
def twice_the_rate(engine) -> Iterator[None]:
    """As a scheduler would do that someone has registered."""

    def double(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3  # ZeRO-3 calls it once for each of its groups

    watched = watch(engine, double)
    yield
    watched.remove()


@contextlib.contextmanager
def without_clipping(engine) -> Iterator[None]:
    if hasattr(engine, "recipe"):
        recipe = engine.recipe
        loose = recipe.optimizer.model_copy(update={"max_grad_norm": 1e9})
        engine.recipe = recipe.model_copy(update={"optimizer": loose})
        yield
        engine.recipe = recipe
    else:
        optimizer = getattr(engine, "model", getattr(engine, "_engine", None)).optimizer
        limit, optimizer.clip_grad = optimizer.clip_grad, 0.0
        yield
        optimizer.clip_grad = limit


@contextlib.contextmanager
def moved(engine, times: int) -> Iterator[None]:
    """What the optimizer's step adds to its weights is added `times` times."""
    before: dict[int, torch.Tensor] = {}

    def remember(optimizer, args, kwargs):
        before.update((id(weight), to_local(weight.detach()).clone()) for weight in updated(optimizer))

    def move(optimizer, args, kwargs):
        for weight in updated(optimizer):
            to_local(weight.detach()).lerp_(before[id(weight)], 1 - times)

    watched = first_step.innermost(arguments["optimizer"]).register_step_post_hook(move)
    also = watch(engine, remember)
    yield
    watched.remove()
    also.remove()


def updated(optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]


def write_elsewhere(engine) -> None:
    """Write each value of the fp32 masters to another place; the working weights stay."""
    for _, kind, values in engine.state.visit(writing=True):
        if kind == WEIGHT:
            values.copy_(values.flip(0))


def watch(engine, hook):
    """The hook comes before that of the check, which is registered again afterwards."""
    made = first_step.innermost(arguments["optimizer"]).register_step_pre_hook(hook)
    again(engine)
    return made


def again(engine) -> None:
    """Let the engine take its next step for its first."""
    check = first_step.FirstStep(**arguments)
    if hasattr(engine, "forward"):
        engine.first_step = engine.forward.first_step = check
    else:
        engine._first_step = check


arguments: dict = {}


class Remembered(first_step.FirstStep):
    def __post_init__(self):
        arguments.update({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        super().__post_init__()


def main() -> None:
    if "UNLINKED" in os.environ:
        deepspeed_introspection.link_masters = lambda engine: None
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    module = sys.modules[type_of_engine(plan)]
    module.FirstStep = Remembered
    task = registry.load_task(plan.recipe)
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    batches = iter(StepBatches(task.train, plan.recipe.seed, plan.recipe.batch, engine.shard, 9))

    def step(repeated: bool = False) -> str:
        micro_batches = next(batches)
        try:
            engine.step([micro_batches[0]] * len(micro_batches) if repeated else micro_batches, 1e-3)
        except TopologyError as error:
            return str(error)
        return ""

    found = {"engine": engine.describe().engine, "as it should be": step(), "later": step(repeated=True)}
    again(engine)
    found["rows"] = step(repeated=True)
    with twice_the_rate(engine):
        found["learning rate"] = step()
    again(engine)
    with without_clipping(engine):
        found["clipping"] = step()
    for key, times in (("not applied", 0), ("applied twice", 2)):
        with moved(engine, times):
            found[key] = step()
    if plan.strategy.backend == "deepspeed":  # elsewhere the optimizer updates the working weights
        again(engine)
        write_elsewhere(engine)
        found["written elsewhere"] = step()
    if plan.strategy.backend == "deepspeed":
        timers = getattr(engine, "model", getattr(engine, "_engine", None)).timers.get_timers()
        assert not any(timer.event_timers for timer in timers.values()), "DeepSpeed keeps an entry for every step"
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


def type_of_engine(plan) -> str:
    name = {"pipeline": "deepspeed_pipeline", "zero": "zero", "schedule": "torch_pipeline"}.get(
        plan.strategy.family, "torch_engine"
    )
    __import__(f"samecurve.engines.{name}")
    return f"samecurve.engines.{name}"


if __name__ == "__main__":
    lifecycle.end_with(main)
