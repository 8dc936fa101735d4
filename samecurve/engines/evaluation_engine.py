"""Evaluation of a trained model in one process, without an optimizer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.accelerator import cpu_bridge
from samecurve.accelerator.accelerator import Accelerator
from samecurve.accelerator.mesh import Mesh
from samecurve.engines import teacher
from samecurve.engines.forward import Forward
from samecurve.engines.loss_implementation import install_loss
from samecurve.errors import ConfigurationError
from samecurve.models.skeleton import construct
from samecurve.models.weights import load_weights
from samecurve.strategy.parallel_dims import ParallelDims

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.task import Task


class EvaluationEngine:
    """Engine that only evaluates: fp32 weights, computed in the recipe's precision.

    Uses the GPU if there is one. The forward pass is shared with the training engines, so both give the same numbers.

    Raises:
        ConfigurationError: precision is fp16 and there is no GPU; Accelerate would ignore fp16.
    """

    shard = (0, 1)

    def __init__(self, model: PreTrainedModel, task: Task, recipe: Recipe):
        precision = recipe.precision
        if cpu_bridge.needed():
            if precision == "fp16":
                raise ConfigurationError("precision: fp16 needs a GPU; compute in another one: --precision fp32")
            os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")  # otherwise Apple's GPU, which lacks float64
        self.accelerator = Accelerator(dims=ParallelDims(), mixed_precision="no" if precision == "fp32" else precision)
        # As in training. With a KV cache, transformers builds no mask that separates packed documents: an eval_loss of
        # 4.60 became 4.69.
        model.config.use_cache = False
        alone = getattr(model, "get_base_model", lambda: model)()  # without peft's wrapper
        skeleton = construct(type(alone), alone.config, torch.device("meta"))
        loss_implementation = install_loss(alone, skeleton, task, recipe, self.accelerator.device)
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)
        beside, mesh = None, Mesh(ParallelDims(), 0, self.accelerator.device)
        if task.teacher is not None:
            beside = teacher.build(self.accelerator, None, mesh, task)
        forward = Forward(self.accelerator, mesh, prepared, task, loss_implementation, beside)
        self.evaluate, self.features, self.outputs = forward.evaluate, forward.features, forward.outputs


def initial_engine(skeleton: PreTrainedModel, recipe: Recipe, task: Task) -> EvaluationEngine:
    """Build the model with the run's initial weights."""
    model = construct(type(skeleton), skeleton.config, torch.device("cpu"), recipe.adapter)
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        load_weights(skeleton, recipe, lambda name, full: tensors[name].copy_(full))
    return EvaluationEngine(model, task, recipe)


class InitialModel:
    """The model with the run's initial weights, as an engine for Task.prepare.

    Built lazily; the task's cache may make the model unnecessary.
    """

    shard = (0, 1)

    def __init__(self, skeleton: PreTrainedModel, recipe: Recipe, task: Task):
        self._skeleton, self._recipe, self._task = skeleton, recipe, task
        self._engine: EvaluationEngine | None = None

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        if self._engine is None:
            self._engine = initial_engine(self._skeleton, self._recipe, self._task)
        return self._engine.features(micro_batches)
