"""The frozen teacher of a distillation run.

FSDP2, ZeRO-3, context parallelism and pipeline schedules divide it over ranks like the trained model; tensor
parallelism does not.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from samecurve.accelerator import deepspeed_introspection, fsdp
from samecurve.engines import context_parallel
from samecurve.engines.start import computes_in_copies
from samecurve.engines.torch_pipeline_stages import LocalStages
from samecurve.errors import ConfigurationError
from samecurve.models import fp32_weights
from samecurve.models import weights as models
from samecurve.models.packed_rows import check_packing
from samecurve.models.pipeline_split import split_layers
from samecurve.models.skeleton import build_skeleton, construct
from samecurve.optim.dtensor import local_numel
from samecurve.specs.precision import compute_dtype, torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.accelerator.mesh import Mesh
    from samecurve.config.schema import Recipe
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan, Strategy


def build(accelerator: Accelerator, plan: Plan | None, mesh: Mesh, task: Task) -> nn.Module:
    """Build the teacher with its weights, in eval mode.

    Args:
        accelerator: the process's Accelerator.
        plan: the run's plan; None for an evaluation outside training.
        mesh: over which FSDP2 shards the teacher.
        task: `teacher` is the run's recipe with the teacher as its model.

    Raises:
        ConfigurationError: the teacher does not separate packed documents, or as models.skeleton.build_skeleton.
    """
    recipe, skeleton = _skeleton(task)
    kept = fp32_weights.names(skeleton, recipe.precision) if plan and plan.strategy.backend == "deepspeed" else set()
    shapes = {name: weight.shape for name, weight in skeleton.named_parameters() if name in kept}
    exact = fp32_weights.ExactValues(shapes, accelerator.device)
    if plan and plan.strategy.shards_model:
        # tensor parallelism does not cut the teacher
        strategy = replace(plan.strategy, dims=replace(plan.strategy.dims, tp=1))
        is_cut, meta = strategy.dims.cp > 1, torch.device("meta")
        model = context_parallel.build(skeleton, recipe, strategy, mesh) if is_cut else _frozen(skeleton, meta)
        fp32_weights.store_frozen_in_bf16(model.requires_grad_(False), recipe, everywhere=True)
        teacher = fsdp.shard(accelerator, model, mesh)
    elif plan and plan.strategy.zero_stage == 3:
        import deepspeed

        assert accelerator.deepspeed_plugin is not None  # of every ZeRO strategy
        config = accelerator.deepspeed_plugin.deepspeed_config
        zero = {key: value for key, value in config["zero_optimization"].items() if key != "offload_optimizer"}
        config = {**config, "zero_optimization": zero}
        divided = _frozen(skeleton, deepspeed_introspection.zero3_init(config))
        exact.install(divided)
        # a separate engine without an optimizer, whose hooks gather each layer during its computation
        teacher, *_ = deepspeed.initialize(model=divided, config=config)
    elif plan and plan.strategy.backend == "deepspeed":
        # DeepSpeed computes in the dtype of the weights
        teacher = _frozen(skeleton, torch.device(accelerator.device))
        for weight in filter(torch.is_floating_point, teacher.parameters()):
            weight.data = weight.data.to(torch_dtype(recipe.precision))
        exact.install(teacher)
    else:
        alone = _frozen(skeleton, torch.device(accelerator.device))
        # single and ddp compute without autocast in training; tp and evaluations use autocast
        fp32_weights.store_frozen_in_bf16(alone, recipe, everywhere=plan is not None and computes_in_copies(plan))
        teacher = accelerator.prepare_model(alone, evaluation_mode=True)
    _fill(teacher, skeleton, recipe, exact.values)
    teacher.eval()  # DeepSpeed's method returns None
    return teacher


class StagedTeacher:
    """The teacher in the stages of the student's pipeline schedule, in eval mode, with its weights.

    Its forward passes precede the schedule, which keeps their last hidden states. The logits of a micro-batch are
    computed together with its loss, so the ranks of the last stage have the teacher's whole head.

    Raises:
        ConfigurationError: the teacher cannot be cut into these stages, or as build.
    """

    def __init__(self, strategy: Strategy, mesh: Mesh, task: Task):
        assert strategy.dims.tp == 1, "stages that are cut have no whole logits to compare"
        recipe, skeleton = _skeleton(task)
        autocast = compute_dtype(recipe.precision)
        self._hidden_size, self._dtype = skeleton.config.hidden_size, autocast or torch.float32
        model = _frozen(skeleton, torch.device("meta"))
        fp32_weights.store_frozen_in_bf16(model, recipe)
        with _named():
            layers = split_layers(model)
            head = copy.deepcopy(layers.pop())  # a tied one is the first stage's embedding
            self._stages = LocalStages(layers, strategy, autocast, mesh)
        # in the dtype that autocast would cast it to: a linear layer, also where it was tied
        self._head = head.to(self._dtype).to_empty(device=mesh.device) if self._stages.has_last else None
        weights: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, weight in [*self._stages.weights.items(), *(self._head.named_weights() if self._head else ())]:
            weights[name].append(weight)

        def write(name: str, full: Tensor) -> None:
            for weight in weights[name]:
                fsdp.write(weight.detach(), full)

        with torch.no_grad():
            models.load_weights(skeleton, recipe, write, names=set(weights))
        for stage in self._stages.modules.values():
            stage.eval()
        self.num_parameters_per_rank = local_numel(chain(*weights.values()))

    def with_hidden(self, batch: MicroBatch) -> MicroBatch:
        """Add the target `teacher` on the ranks of the last stage: hidden states, see `targets`. Collective."""
        hidden = self._stages.forward(batch, self._hidden_size)
        if hidden is None:
            return batch
        return replace(batch, targets=batch.targets | {"teacher": hidden.to(self._dtype)})

    def targets(self, batch: MicroBatch) -> dict[str, Tensor]:
        """Return the targets of what `with_hidden` returned, `teacher` being the logits, see DistillTask."""
        assert self._head is not None  # losses are computed on the ranks of the last stage
        with torch.no_grad():
            return batch.targets | {"teacher": self._head(batch.targets["teacher"])}


def _skeleton(task: Task) -> tuple[Recipe, PreTrainedModel]:
    """Return the run's recipe with the teacher as its model, and the teacher's architecture."""
    recipe = task.teacher
    assert recipe is not None  # the callers ask for a teacher only where there is one
    with _named():
        skeleton = build_skeleton(recipe, task.vocabulary_size)
        check_packing(skeleton.config, recipe.data.packing, recipe.batch.sequence_length)
    return recipe, skeleton


@contextmanager
def _named() -> Iterator[None]:
    """Name the teacher in an error about a model, which would otherwise seem to be about the student."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"distill.teacher: {error}") from None


def _frozen(skeleton: PreTrainedModel, where) -> PreTrainedModel:
    return construct(type(skeleton), skeleton.config, where).requires_grad_(False)


@torch.no_grad()
def _fill(teacher: nn.Module, skeleton: PreTrainedModel, recipe: Recipe, exact: Mapping[str, Tensor]) -> None:
    module = getattr(teacher, "module", teacher)
    tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}

    def write(name: str, full: Tensor) -> None:
        tensor = tensors[name]
        if name in exact:
            exact[name].copy_(full)
        if not isinstance(tensor, nn.Parameter):
            fp32_weights.fill_buffer(tensor, full, skeleton.get_buffer(name))
            return
        if not hasattr(tensor, "ds_id"):
            fsdp.write(tensor.detach(), full)
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                tensor.data.copy_(full)

    models.load_weights(skeleton, recipe, write)
