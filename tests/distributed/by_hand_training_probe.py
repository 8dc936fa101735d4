"""Lessons of examples/by_hand/ against whole engines, started with train.py's arguments without --strategy.

$STRATEGIES: paths of strategy files, separated by commas, which spread the ranks alike. The recipe's rows and model are
not read. Prints a line for each comparison, see by_hand_compare.py.
"""

from __future__ import annotations

import os
import sys

import torch
from by_hand_compare import compare
from by_hand_models import Mlp, SquaredErrors, Tower, micro_batches, skeleton
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samecurve.engines import factory
from samecurve.run import lifecycle
from samecurve.strategy import preflight

# isort: split
import data_parallel
import pipeline
import zero1
from pipeline_schedules import SCHEDULES
from wire import start

LEARNING_RATE = 0.01
SCHEDULE_OF = {"GPipe": "GPipe", "1F1B": "1F1B", "ZBVZeroBubble": "zero bubble"}
seen: dict[int, Tensor] = {}  # the gradient of each weight, by id, as an optimizer read it last


def note_gradients(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        seen.update({id(weight): weight.grad.clone() for weight in group["params"]})


def build(accelerator, plan, kind, num_layers):
    torch.set_default_dtype(torch.float32)  # the lessons' is float64
    return factory.build(accelerator, plan, skeleton(kind, num_layers), SquaredErrors())


def replicas(accelerator, plan) -> None:
    """The steps of the MLP: DDP's weights and whole gradients, or ZeRO-1's weights and gradient of a rank's part."""
    rank, n = start()
    x, y = torch.randn(2, data_parallel.ROWS, data_parallel.WIDTH)
    first, second = (data_parallel.WIDTH, data_parallel.HIDDEN), (data_parallel.HIDDEN, data_parallel.WIDTH)
    initial = Mlp.initial = [torch.randn(first) / 4, torch.randn(second) / 4]
    sharded = plan.strategy.zero_stage == 1
    if sharded:
        weights, shard, _ = zero1.train(x, y, initial, rank, n)
        gradients = [shard.grad]
    else:
        weights = data_parallel.train(x, y, initial, rank, n)
        gradients = [weight.grad for weight in weights]

    engine = build(accelerator, plan, Mlp, 2)
    rows = micro_batches(x, y, engine.shard, plan.recipe.batch.micro_batch_size, embedded=False)
    seen.clear()
    for _ in range(data_parallel.STEPS):
        assert engine.step(rows, LEARNING_RATE).applied
    name = engine.describe().engine
    compare(f"{name}:gradients", list(seen.values()), gradients)
    compare(f"{name}:weights", [engine.tensors[name] for name in engine.shapes], weights)


def stages(accelerator, plan) -> None:
    """The gradient of each rank's layer, and the loss. ZB-V has two stages per rank, so a layer is two of them."""
    schedule = plan.strategy.schedule
    rank, n = start()
    x, y = torch.randn(2, pipeline.ROWS, pipeline.WIDTH)
    Tower.rows, Tower.initial = x, [torch.randn(pipeline.WIDTH, pipeline.WIDTH) / 3 for _ in range(n)]
    Tower.with_identities = schedule == "ZBVZeroBubble"
    gradient, loss, _ = pipeline.step(SCHEDULE_OF[schedule], x, y, Tower.initial[rank], rank, n)
    torch.distributed.all_reduce(loss)  # known on the last rank

    engine = build(accelerator, plan, Tower, n * (1 + Tower.with_identities))
    rows = micro_batches(x, y, engine.shard, plan.recipe.batch.micro_batch_size, embedded=True)
    assert len(rows) == pipeline.MICRO_BATCHES
    seen.clear()
    mean = engine.step(rows, LEARNING_RATE).loss
    own = seen[id(engine._stages.weights[f"model.layers.{Tower.place(rank)}.weight"])]
    # the engine divides by the rows
    compare(engine.describe().engine, [own, torch.tensor(mean)], [gradient / len(x), loss / len(x)])


def main() -> None:
    assert set(SCHEDULE_OF.values()) == SCHEDULES.keys()
    strategies = os.environ["STRATEGIES"].split(",")
    plans = [preflight.plan([*sys.argv[1:], "--strategy", path], os.environ) for path in strategies]
    accelerator = factory.build_accelerator(plans[0])
    register_optimizer_step_pre_hook(note_gradients)
    for plan in plans:
        (stages if plan.strategy.torch_schedule else replicas)(accelerator, plan)
    accelerator.end_training()


if __name__ == "__main__":
    lifecycle.end_with(main)
