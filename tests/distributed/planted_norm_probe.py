"""Run under a launcher with train.py's arguments: losses and gradient norms of a few steps, once for each of $CASES.

$CASES: names of ERRORS, separated by commas; "none" is the code as it is. All are made and trained by one process tree,
one after the other, from the same weights. Prints one JSON line on rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from unittest import mock

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from samecurve.accelerator import accelerator as methods
from samecurve.accelerator import gradient_norm
from samecurve.data.batches import StepBatches
from samecurve.engines import factory, tensor_parallel, torch_engine, torch_pipeline
from samecurve.engines.first_step import FirstStep
from samecurve.engines.torch_pipeline import TorchPipelineEngine
from samecurve.engines.torch_pipeline_stages import LocalStages
from samecurve.models.attention import context
from samecurve.models.skeleton import build_skeleton
from samecurve.run import lifecycle
from samecurve.strategy import preflight
from samecurve.strategy.parallel_dims import BATCH, DIMENSIONS
from samecurve.tasks import registry

STEPS = 3
_trained, _gathered, _copies, _divide = (
    LocalStages.trained,
    context.all_gather,
    gradient_norm.num_copies,
    FSDPModule.set_gradient_divide_factor,
)


def _nothing(*_args: object) -> None:
    """Stands for a call that was forgotten."""


def _weight_by_rows(accelerator: methods.Accelerator, _reduction: str, num_items: int) -> float:
    return accelerator.mesh.dims.size(*BATCH) / num_items


def _one_copy(_parameter: object, mesh: object) -> int:
    return 1


def _one_copy_of_experts(parameter: torch.nn.Parameter, mesh) -> int:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return 1 if "ep" in (names or ()) else _copies(parameter, mesh)


def _divided_twice(unit: FSDPModule, factor: float) -> None:
    _divide(unit, factor**2)


def _without_gradients_of_others(keys: torch.Tensor, dim: int, group) -> torch.Tensor:
    parts = [*_gathered(keys.detach(), dim, group).chunk(group.size(), dim)]
    parts[group.rank()] = keys
    return torch.cat(parts, dim)


def _squares_of_own_stages(engine: TorchPipelineEngine, values: torch.Tensor) -> tuple[float, ...]:
    mesh, others = engine._mesh, [name for name in DIMENSIONS if name != "pp"]
    return (*mesh.sum(values[:2], over=(*others,)), *mesh.sum(values[2:], over=DIMENSIONS))


def _unchecked(_first_step: FirstStep, result, *_args: object):
    return result


def _all_counted(stages: LocalStages) -> tuple[list, list]:
    own, others = _trained(stages)
    return own + others, []


# The comparison of the first step finds a norm that the ranks do not share, or a wrong update, before a test sees it.
_FOUND_AT_ONCE = (FirstStep, "checked", _unchecked)

# What is replaced, by name of the error. An engine has imported some functions by name.
ERRORS = {
    "none": [],
    "gradients stay where PyTorch left them": [
        (methods, "place_gradients", _nothing),
        (torch_pipeline, "place_gradients", _nothing),
        _FOUND_AT_ONCE,
    ],
    "each rank's copy counts": [
        (module, "num_copies", _one_copy) for module in (gradient_norm, torch_engine, torch_pipeline)
    ],
    "a tied weight counts on both stages": [(LocalStages, "trained", _all_counted)],
    "a norm's gradient is of the rank's tokens": [(tensor_parallel, "sum_gradients", _nothing)],
    "the norm is of the rank's stages": [(TorchPipelineEngine, "_total", _squares_of_own_stages), _FOUND_AT_ONCE],
    "the norm is of a part's shards": [
        (gradient_norm, "DIMENSIONS", tuple(name for name in DIMENSIONS if name != "cp")),
        _FOUND_AT_ONCE,
    ],
    "gradients are a mean over the parts of a row": [(methods.Accelerator, "_weight", _weight_by_rows)],
    "keys miss the gradients of other parts' queries": [(context, "all_gather", _without_gradients_of_others)],
    "experts' gradients are not divided": [(FSDPModule, "set_gradient_divide_factor", _nothing)],
    "experts' gradients are divided twice": [(FSDPModule, "set_gradient_divide_factor", _divided_twice)],
    "each rank's copy of an expert counts": [
        (module, "num_copies", _one_copy_of_experts) for module in (gradient_norm, torch_engine)
    ],
}


def main() -> None:
    plan = preflight.plan(sys.argv[1:], os.environ)
    accelerator = factory.build_accelerator(plan)
    task, found = registry.load_task(plan.recipe), {}
    for name in os.environ["CASES"].split(","):
        planted = [mock.patch.object(*error) for error in ERRORS[name]]
        for each in planted:
            each.start()
        found[name] = trained(accelerator, plan, task)
        for each in planted:
            each.stop()
    accelerator.print("FOUND " + json.dumps(found))
    accelerator.end_training()


def trained(accelerator, plan, task) -> dict:
    skeleton = build_skeleton(plan.recipe, task.vocabulary_size, task.special_tokens)
    engine = factory.build(accelerator, plan, skeleton, task)
    steps = StepBatches(task.train, plan.recipe.seed, plan.recipe.batch, engine.shard, STEPS)
    results = [engine.step(micro_batches, 1e-3) for micro_batches in steps]
    return {
        "engine": engine.describe().engine,
        "loss": [result.loss for result in results],
        "norm": [result.grad_norm for result in results],
    }


if __name__ == "__main__":
    lifecycle.end_with(main)
