"""Engine for one device, DDP, FSDP2, HSDP, and tensor, context and expert parallelism, based on Accelerate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samecurve.accelerator import fsdp
from samecurve.accelerator.gradient_norm import num_copies
from samecurve.accelerator.mesh import describe_live_mesh
from samecurve.accelerator.sharded_state import DTensorShards
from samecurve.engines import context_parallel, expert_parallel, router_loss, tensor_parallel
from samecurve.engines.accelerated import AcceleratedEngine
from samecurve.engines.context_parallel import SequencePart
from samecurve.engines.first_step import FirstStep
from samecurve.engines.loss_implementation import install_loss
from samecurve.engines.start import computes_in_copies
from samecurve.interfaces.engine import EngineDescription, dtype_name
from samecurve.interfaces.sharded_state import State
from samecurve.models import bf16_copies, compilation, dropout, fp32_weights, liger, quantized
from samecurve.models.lora import trained_shapes
from samecurve.models.skeleton import construct, freeze
from samecurve.models.weights import load_weights
from samecurve.optim import factory
from samecurve.optim.dtensor import local_gradient, local_numel
from samecurve.optim.parameter_groups import parameter_groups, roles_of
from samecurve.specs.precision import PRECISIONS
from samecurve.strategy.parallel_dims import DIMENSIONS, FSDP, LOSS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan


class TorchEngine(AcceleratedEngine):
    """Implementation of interfaces.engine.Engine. `skeleton` is the model on the meta device and stays there."""

    def __init__(self, accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task):
        parts = self._assemble(accelerator, plan, skeleton, task)
        self.state = self._build_state()
        with torch.no_grad():
            load_weights(skeleton, self.recipe, self._write)
        add, copies = partial(self.mesh.sum, over=DIMENSIONS), partial(num_copies, mesh=self.mesh)
        readers = self.mesh.dims.world_size // self.shard[1]
        self.first_step = FirstStep(plan, self.optimizer, self.state, self.shard, add, copies, readers)
        self.forward = self._build_forward(plan, **parts)

    def _assemble(
        self, accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task
    ) -> dict[str, object]:
        """Build the model as the strategy prepares it, with weights of no value yet, and the optimizer.

        Returns:
            The parts of the forward passes, see `_build_forward`.
        """
        self.accelerator, self.plan, self.skeleton, self.task = accelerator, plan, skeleton, task
        self.recipe = plan.recipe
        self.device: torch.device = accelerator.device
        self.mesh = accelerator.mesh
        self.shard = self.mesh.shard
        self._accumulate_as(plan)
        self.loss_scale = LossScale() if self.recipe.precision == "fp16" else None
        self.shapes = trained_shapes(skeleton)
        self.sharded, self.cut = plan.strategy.shards_model, plan.strategy.dims.tp > 1
        self.copies = computes_in_copies(plan)
        part = context_parallel.part_of(plan.strategy, self.mesh, skeleton)
        # The order matters. Ranks divide a model by the names and classes of its modules, before anything wraps these.
        # Dropout knows the parts; what a layer computes, and how the loss is computed, is settled before FSDP2 and DDP
        # hook into the modules. The optimizer takes the weights that these leave, and values are loaded at last, into
        # what this rank keeps of each weight.
        model = fp32_weights.cast_weights(freeze(self._build(part), self.recipe.optimizer), self.recipe.optimizer)
        summed = []  # names of weights whose gradients are sums over the tensor-parallel ranks
        if self.cut:
            summed = tensor_parallel.apply(model, self.mesh, plan.strategy.tp_sequence_parallel)
        if plan.strategy.dims.ep > 1:
            expert_parallel.apply(model, self.mesh)
        cut = tensor_parallel.parts(model, self.mesh)
        drops = dropout.install(model, self.recipe.seed, self.device, part.chunks, cut)
        compilation.prepare(model, self.recipe, self.device, is_cut=self.cut, copies=self.copies)
        loss_implementation = install_loss(model, skeleton, task, self.recipe, self.device)
        router = router_loss.install(self.recipe, model, self.mesh)
        self.model = self._prepare(model)
        # `accelerator.unwrap_model` would import deepspeed
        self.module = getattr(self.model, "module", self.model)
        self.tensors = {**dict(self.module.named_buffers()), **dict(self.module.named_parameters())}
        self.summed = [self.tensors[name] for name in summed]
        # FSDP2 leaves these whole, and to this engine the reduction of their gradients, in one order on all ranks
        kept = fp32_weights.names(skeleton, self.recipe.precision) if self.sharded else set()
        self.whole = [self.tensors[name] for name in self.shapes if name in kept]
        self.optimizer = self._build_optimizer()
        return {"loss_implementation": loss_implementation, "dropout": drops, "router": router, "part": part}

    def _build(self, part: SequencePart) -> PreTrainedModel:
        """Build the model, on the meta device where weights are cut or sharded."""
        strategy, model_class, config = self.plan.strategy, type(self.skeleton), self.skeleton.config
        if not (self.sharded or self.cut or self.recipe.adapter.quantization):
            return construct(model_class, config, torch.device(self.device), self.recipe.adapter)
        if strategy.dims.ep > 1:
            expert_parallel.check(self.skeleton, strategy)
        if self.cut:
            tensor_parallel.check(self.skeleton, strategy)
        factory.check_shards(self.recipe.optimizer.name, self.shapes, strategy.dims.size(*FSDP))
        if part.count > 1:
            model = context_parallel.build(self.skeleton, self.recipe, strategy, self.mesh, self.recipe.adapter)
        else:
            model = construct(model_class, config, torch.device("meta"), self.recipe.adapter)
        quantized.quantize_layers(model, self.recipe)
        if not (self.sharded or self.cut):
            model.to_empty(device=self.device)
            model.tie_weights()  # allocation gave each of two tied modules its own parameter
        return model

    def _prepare(self, model: PreTrainedModel) -> nn.Module:
        if self.sharded:
            fp32_weights.store_frozen_in_bf16(model, self.recipe, everywhere=True)
            expert_parallel.shard(model, self.mesh, self.accelerator)
            whole = fp32_weights.names(model, self.recipe.precision)
            return self.accelerator.prepare_model(model, whole=whole)
        if self.cut:  # only autocast is left to Accelerate
            tensor_parallel.allocate(model, self.device)
        elif self.copies:
            fp32_weights.store_frozen_in_bf16(model, self.recipe, everywhere=True)
            bf16_copies.install_around(model)
        return self.accelerator.prepare_model(model, evaluation_mode=self.cut)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        settings = self.recipe.optimizer
        groups = parameter_groups(self.module.named_parameters(), settings, roles_of(self.skeleton))
        return factory.build_optimizer(
            tensor_parallel.groups_by_mesh(groups), settings, self.recipe.precision, self.recipe.seed
        )

    def _build_state(self) -> State:
        settings = self.recipe.optimizer
        return DTensorShards(
            {name: self.tensors[name] for name in self.shapes},
            self.optimizer,
            factory.state_names(settings, self.shapes, roles_of(self.skeleton).matrices),
            replica=(self.accelerator.process_index, self.accelerator.num_processes),
            factors=factory.factor_shapes(settings, self.shapes),
            reload=partial(fsdp.reshard, self.model),
        )

    def _write(self, name: str, full: Tensor) -> None:
        fsdp.write(self.tensors[name].detach(), quantized.write(self.module, name, full, self.device))

    def _loss_scale(self) -> float:
        return self.loss_scale.value if self.loss_scale else 1.0

    def _may_rescale(self) -> bool:
        return self.loss_scale is not None and not self.loss_scale.exhausted

    def _complete_gradients(self) -> None:
        tensor_parallel.sum_gradients(self.summed, self.mesh)
        if whole := [parameter.grad for parameter in self.whole if parameter.grad is not None]:
            self.mesh.add(whole, over=LOSS)
            torch._foreach_div_(whole, self.mesh.dims.size(*LOSS))  # as FSDP2 does
        if (scale := self._loss_scale()) != 1.0:
            trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            torch._foreach_div_([local_gradient(parameter) for parameter in trained], scale)

    def _update(self, grad_norm: float) -> bool:
        applied = math.isfinite(grad_norm)
        if applied:
            self.optimizer.step()
        # zeroed gradients stay views of DDP's buckets; new ones would need extra memory until the last micro-batch
        several = self.accelerator.gradient_accumulation_steps > 1
        in_buckets = several and isinstance(self.model, DistributedDataParallel)
        self.optimizer.zero_grad(set_to_none=not in_buckets)
        if self.loss_scale:
            self.loss_scale.update(applied)
        return applied

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        for name in self.shapes:
            full = self.tensors[name].detach()
            if isinstance(full, DTensor):
                on_mesh = cast(DTensor, full.to(full.device_mesh.device_type))  # typed as Tensor; offloaded shards move
                full = on_mesh.full_tensor()
            yield name, full.float().cpu() if self.accelerator.is_main_process else None

    @property
    def loss_scale_state(self) -> dict:
        return {"value": self.loss_scale.value, "good_steps": self.loss_scale.good_steps} if self.loss_scale else {}

    @loss_scale_state.setter
    def loss_scale_state(self, values: dict) -> None:
        if self.loss_scale and values:
            self.loss_scale.value, self.loss_scale.good_steps = values["value"], values["good_steps"]

    def describe(self) -> EngineDescription:
        """See Engine.describe. Batch size and clipping come from the recipe, all else from the live objects."""
        # as the strategy has sharded it: the model's own may be gathered, as a forward pass leaves the root's
        weight = self.tensors[next(iter(self.shapes))]
        # Accelerate silently ignores a precision that the device does not support
        casts = self.accelerator.native_amp or self.copies
        precision = self.accelerator.mixed_precision if casts else "fp32"
        reduced = weight.dtype if self.accelerator.num_processes > 1 else None
        offload = ()
        if isinstance(self.model, FSDPModule):
            assert isinstance(weight, DTensor)
            policy = self.model._get_fsdp_state()._mp_policy
            precision = PRECISIONS[dtype_name(policy.param_dtype or torch.float32)]
            reduced = policy.reduce_dtype
            if weight.to_local().device.type != self.device.type:
                offload = ("optimizer:cpu", "param:cpu")
        taught, exchanging = self.forward.teacher, context_parallel.attention_of(self.module)
        groups = {"dp_replicate": getattr(self.model, "process_group", None), "cp": getattr(exchanging, "group", None)}
        weights = [self.tensors[name] for name, _ in self.skeleton.named_parameters()]
        return EngineDescription(
            engine=type(self.model).__name__,
            optimizer=type(self.optimizer).__name__,
            world_size=self.accelerator.num_processes,
            device=str(self.device),
            num_parameters=self.skeleton.num_parameters(),
            num_trained_parameters=sum(shape.numel() for shape in self.shapes.values()),
            num_parameters_per_rank=local_numel(weights),
            num_teacher_parameters_per_rank=local_numel(taught.parameters()) if taught else 0,
            precision=precision,
            micro_batch_size=self.recipe.batch.micro_batch_size,
            gradient_accumulation_steps=self.accelerator.gradient_accumulation_steps,
            gradient_clipping=self.recipe.optimizer.max_grad_norm,
            weight_dtype=dtype_name(weight.dtype),
            reduce_dtype=dtype_name(reduced) if reduced else None,
            whole_gradient_bytes=fsdp.whole_gradient_bytes(self.plan, self.shapes, reduced),
            sharded=isinstance(self.model, FSDPModule),
            **describe_live_mesh(weights, groups),
            context_parallel=exchanging.name if exchanging else "",
            tp_sequence_parallel=tensor_parallel.cuts_sequence(self.module),
            offload=offload,
            loss_implementation=self.forward.loss_implementation,
            kernels=tuple(liger.replaced(self.module)),
        )


@dataclass
class LossScale:
    """Loss scale that halves on overflow and doubles after `growth_interval` good steps.

    After Micikevicius et al. 2018, arXiv:1710.03740. torch.amp.GradScaler checks the local gradients for overflow;
    under FSDP2 these are shards, so ranks could disagree about skipping a step.
    """

    value: float = 2.0**16  # this and the interval are the defaults of torch.amp.GradScaler
    growth_interval: int = 2000
    minimum: float = 1.0
    good_steps: int = 0

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its minimum, so that an overflow means that the gradient itself is not finite."""
        return self.value <= self.minimum

    def update(self, applied: bool) -> None:
        """Adapt the scale to a finished step. Call it on all ranks with the same value."""
        if not applied:
            self.value, self.good_steps = max(self.value / 2, self.minimum), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0
