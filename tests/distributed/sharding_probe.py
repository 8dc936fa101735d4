"""Run under a launcher with train.py's arguments: a few steps, and what the live engine does with the strategy's keys.

Prints one JSON line on rank 0: losses, norms, what the engine says of itself, its units, DeepSpeed's numbers or in how
many storages DDP's gradients lie, and each kind of collective of the last step by the dtype of what is sent:
{"_reduce_scatter_base_ float32": 6}.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samecurve.data.batches import StepBatches
from samecurve.engines import factory
from samecurve.interfaces.engine import dtype_name
from samecurve.models.skeleton import build_skeleton
from samecurve.optim.schedule import learning_rate
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.tasks import registry

STEPS = 8


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            sent = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.seen[f"{function._schema.name.removeprefix('c10d::')} {dtype_name(sent[-1].dtype)}"] += 1
        return function(*args, **(kwargs or {}))


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator, recipe = factory.build_accelerator(plan), plan.recipe
    task = registry.load_task(recipe)
    skeleton = build_skeleton(recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    if isinstance(engine.model, DistributedDataParallel):
        note_gradients(engine)
    results = []
    for step, rows in enumerate(StepBatches(task.train, recipe.seed, recipe.batch, engine.shard, STEPS), start=1):
        with Collectives() as collectives:
            results.append(engine.step(rows, learning_rate(recipe, step)))
    found = {"loss": [each.loss for each in results], "grad_norm": [each.grad_norm for each in results]}
    found |= {"described": asdict(engine.describe()), "collectives": dict(collectives.seen), "live": live(engine)}
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


def live(engine) -> dict:
    if hasattr(engine.model, "zero_optimization_stage"):
        return deepspeed_numbers(engine.model)
    if isinstance(engine.model, DistributedDataParallel):
        return {"gradient_storages": engine.gradient_storages}
    names = {id(module._get_fsdp_state()): name for name, module in engine.model.named_modules() if is_unit(module)}
    ahead = {
        name: [names[id(state)] for state in module._get_fsdp_state()._states_to_forward_prefetch]
        for name, module in engine.model.named_modules()
        if is_unit(module)
    }
    return {"prefetched": {name: following for name, following in ahead.items() if following}, "units": [*ahead]}


def note_gradients(engine) -> None:
    """How many storages all gradients lie in, after each micro-batch; of the last step."""
    each, engine.gradient_storages = engine.forward.with_contexts, []

    def noted(micro_batches, tokens):
        for found in each(micro_batches, tokens):
            yield found  # and when the next one is asked for, this one has been through its backward pass
            gradients = [parameter.grad for parameter in engine.model.parameters()]
            engine.gradient_storages.append(len({gradient.untyped_storage().data_ptr() for gradient in gradients}))
            del engine.gradient_storages[: -engine.accelerator.gradient_accumulation_steps]

    engine.forward.with_contexts = noted


def is_unit(module) -> bool:
    return isinstance(module, FSDPModule)


def deepspeed_numbers(engine) -> dict:
    optimizer, found = engine.optimizer, {"reduce_bucket_size": engine.optimizer.reduce_bucket_size}
    if engine.zero_optimization_stage() < 3:
        return found
    gathering = optimizer.parameter_offload
    coordinator = gathering.get_param_coordinator()
    private = "_PartitionedParameterCoordinator__"
    return found | {
        "stage3_prefetch_bucket_size": getattr(coordinator, f"{private}prefetch_bucket_sz"),
        "stage3_max_live_parameters": getattr(coordinator, f"{private}max_n_available_params"),
        "stage3_max_reuse_distance": getattr(coordinator, f"{private}max_reuse_dist_in_numel"),
        "stage3_param_persistence_threshold": gathering.param_numel_persistence_threshold,
        "persistent": [list(parameter.ds_shape) for parameter in gathering.persistent_parameters],
    }


if __name__ == "__main__":
    lifecycle.end_with(main)
