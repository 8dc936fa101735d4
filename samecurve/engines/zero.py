"""Engine for ZeRO-1, 2 and 3 with CPU and NVMe offload: DeepSpeed's engine, prepared by Accelerate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    set_z3_leaf_module,
)
from torch import Tensor, nn
from torch.nn import functional

from samecurve.accelerator import deepspeed_introspection
from samecurve.accelerator.sharded_state import Zero3Shards, Zero12Shards
from samecurve.engines import router_loss
from samecurve.engines.accelerated import AcceleratedEngine
from samecurve.engines.first_step import FirstStep
from samecurve.engines.loss_implementation import install_loss
from samecurve.interfaces.engine import EngineDescription, EvalResult, StepResult, dtype_name
from samecurve.interfaces.sharded_state import State
from samecurve.models import compilation, dropout, fp32_weights, liger, quantized
from samecurve.models.fp32_weights import ExactValues
from samecurve.models.lora import trained_shapes
from samecurve.models.skeleton import construct, freeze
from samecurve.models.weights import load_weights
from samecurve.optim.factory import build_optimizer, state_names
from samecurve.optim.parameter_groups import parameter_groups, roles_of
from samecurve.specs.precision import torch_dtype
from samecurve.strategy.parallel_dims import LOSS, ParallelDims

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.config.schema import Optimizer
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan


class ZeroEngine(AcceleratedEngine):
    """Implementation of interfaces.engine.Engine, in which DeepSpeed does backward, clipping, loss scaling and update.

    `skeleton` is the model on the meta device and stays there.
    """

    def __init__(self, accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task):
        self.accelerator, self.skeleton, self.task = accelerator, skeleton, task
        self.device: torch.device = accelerator.device
        self.mesh = accelerator.mesh
        self.shard = self.mesh.shard
        self._accumulate_as(plan)
        self.shapes = trained_shapes(skeleton)
        self.recipe = recipe = plan.recipe
        # The order matters. ZeRO-3 divides each weight as soon as it is built, so everything that goes by shapes reads
        # the skeleton's. What a layer computes is settled before DeepSpeed hooks into the modules. Values are loaded
        # after `prepare`, because DeepSpeed copies its fp32 masters from weights that it has rounded.
        model = freeze(self._build(plan), recipe.optimizer)
        for module in model.modules():
            # peft computes with the matrices of adapted parameters, and adds to these, outside of their own modules
            if hasattr(module, "parameter_name"):
                set_z3_leaf_module(module, True)
        drops = dropout.install(model, recipe.seed, self.device)
        compilation.prepare(model, recipe, self.device)
        loss_implementation = install_loss(model, skeleton, task, recipe, self.device)
        router = router_loss.install(recipe, model, self.mesh)
        kept = fp32_weights.names(skeleton, recipe.precision)
        self.exact = ExactValues(
            {name: weight.shape for name, weight in skeleton.named_parameters() if name in kept}, self.device
        )
        self.exact.install(model)
        self._prepare(model, recipe.optimizer)
        with torch.no_grad():
            load_weights(skeleton, recipe, self._write)
        self.first_step = FirstStep(plan, self.optimizer, self.state, self.shard, self.mesh.sum)
        self.forward = self._build_forward(plan, loss_implementation=loss_implementation, dropout=drops, router=router)

    def _build(self, plan: Plan) -> PreTrainedModel:
        """Build the model. ZeRO-3 divides each weight as soon as it is allocated."""
        assert self.accelerator.deepspeed_plugin is not None  # of every ZeRO strategy
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        divides, adapter = plan.strategy.zero_stage == 3, plan.recipe.adapter
        if not adapter.quantization:
            where: Any = deepspeed_introspection.zero3_init(config) if divides else torch.device(self.device)
            return construct(type(self.skeleton), self.skeleton.config, where, adapter)
        # layers are replaced before anything is allocated
        model = construct(type(self.skeleton), self.skeleton.config, torch.device("meta"), adapter)
        quantized.quantize_layers(model, plan.recipe)
        for module in reversed([*model.modules()]):  # children first, because DeepSpeed divides all below a module
            module.to_empty(device=self.device, recurse=False)
            if divides and any(True for _ in module.parameters(recurse=False)):
                dtype = torch_dtype(plan.recipe.precision)
                for weight in filter(torch.is_floating_point, module.parameters(recurse=False)):
                    weight.data = weight.data.to(dtype)
                deepspeed_introspection.zero3_init(config, module)
        model.tie_weights()  # allocation gave each of two tied modules its own parameter
        return model

    def _prepare(self, model: nn.Module, settings: Optimizer) -> None:
        """Hand the model to DeepSpeed, with an optimizer, and find this rank's shards of both."""
        groups = parameter_groups(model.named_parameters(), settings, roles_of(self.skeleton))
        self.model, self.optimizer = self.accelerator.prepare(model, build_optimizer(groups, settings))
        deepspeed_introspection.link_masters(self.model)
        deepspeed_introspection.skip_at_smallest_scale(self.model)
        self.scaler = deepspeed_introspection.dynamic_scaler(self.model)
        self.grow_scale = deepspeed_introspection.grow_after_step(self.model)
        module = self.model.module
        self.tensors = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        trained, states = {name: self.tensors[name] for name in self.shapes}, state_names(settings, self.shapes)
        shards = (
            Zero3Shards(trained, self.model.optimizer, states, self.shard[0], self._reload_weights)
            if self.model.zero_optimization_stage() == 3
            else Zero12Shards(trained, self.model.optimizer, states, set(trained), self._reload_weights)
        )
        self.state: State = shards

    def _write(self, name: str, full: Tensor) -> None:
        """Write the working weight and its fp32 master, which DeepSpeed would otherwise copy from rounded values."""
        tensor, full = self.tensors[name], quantized.write(self.model.module, name, full, self.device)
        if name in self.exact.values:
            self.exact.values[name].copy_(full)
        if not isinstance(tensor, nn.Parameter):
            fp32_weights.fill_buffer(tensor, full, self.skeleton.get_buffer(name))
        elif hasattr(tensor, "ds_id"):
            with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
                if self.accelerator.is_main_process:
                    tensor.data.copy_(full)
            if name in self.shapes:  # a frozen parameter has no master
                rank, world = self.shard
                length = -(-full.numel() // world)  # DeepSpeed pads the last partition
                padded = functional.pad(full.flatten(), (0, length * world - full.numel()))
                # not safe_set_full_fp32_param, which narrows past the end where the last partition is padded (DeepSpeed
                # 0.19.8)
                safe_set_local_fp32_param(tensor, padded.narrow(0, rank * length, length).to(self.device))
        else:
            tensor.data.copy_(full)
            if name in self.shapes:
                safe_set_full_fp32_param(tensor, full.to(tensor.device))

    def _reload_weights(self) -> None:
        """Copy the masters of the weights that are computed in fp32, after an update or a resume. Collective."""
        values = {name: value for name, value in self.exact.values.items() if name in self.shapes}
        if not values:
            return
        masters = {name: torch.zeros_like(value).view(-1) for name, value in values.items()}
        for shard, part in self.state.weights(masters):
            masters[shard.name].narrow(0, shard.region.start, shard.region.numel).copy_(part)
        self.mesh.add([*masters.values()], over=LOSS)
        for name, value in values.items():
            value.view(-1).copy_(masters[name])

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        self._reload_weights()
        return super().step(micro_batches, learning_rate)

    def _may_rescale(self) -> bool:
        return self.scaler is not None and self.scaler.cur_scale > self.scaler.min_scale

    def _complete_gradients(self) -> None:
        pass  # DeepSpeed's are complete

    def _update(self, grad_norm: float) -> bool:
        self.optimizer.step()
        applied = self.model.was_step_applied()
        if applied and self.grow_scale:
            self.grow_scale()
        return applied

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        self._reload_weights()
        return super().evaluate(micro_batches)

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self._reload_weights()
        return super().features(micro_batches)

    def outputs(self, batch: MicroBatch, positions: Tensor | None = None) -> Tensor | None:
        self._reload_weights()
        return super().outputs(batch, positions)

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        for name in self.shapes:
            full = safe_get_full_fp32_param(self.tensors[name])
            assert full is not None  # every trained weight has a master
            yield name, full.float().cpu() if self.accelerator.is_main_process else None

    @property
    def loss_scale_state(self) -> dict:
        return deepspeed_introspection.loss_scale_state(self.model)

    @loss_scale_state.setter
    def loss_scale_state(self, values: dict) -> None:
        deepspeed_introspection.set_loss_scale(self.model, values)

    def describe(self) -> EngineDescription:
        engine, taught = self.model, self.forward.teacher
        offload = _placed("optimizer", engine.zero_offload_optimizer())
        if engine.zero_optimization_stage() == 3:
            offload += _placed("param", engine.zero_offload_param())
        return EngineDescription(
            engine=type(engine).__name__,
            **deepspeed_introspection.numbers(engine),
            world_size=self.accelerator.num_processes,
            dims=ParallelDims(dp_shard=engine.dp_world_size),
            device=str(self.device),
            num_parameters=self.skeleton.num_parameters(),
            num_trained_parameters=sum(shape.numel() for shape in self.shapes.values()),
            num_parameters_per_rank=_local_numel(self.tensors[name] for name, _ in self.skeleton.named_parameters()),
            num_teacher_parameters_per_rank=_local_numel(taught.parameters()) if taught else 0,
            weight_dtype=dtype_name(engine.get_data_types()[0]),
            sharded=hasattr(next(engine.parameters()), "ds_id"),
            offload=offload,
            secondary_partition=deepspeed_introspection.secondary_partition(engine.module),
            loss_implementation=self.forward.loss_implementation,
            kernels=tuple(liger.replaced(engine.module)),
        )


def _local_numel(parameters: Iterable[Any]) -> int:
    # ZeRO-3 adds ds_tensor, this rank's partition
    return sum(p.ds_tensor.ds_numel if hasattr(p, "ds_tensor") else p.numel() for p in parameters)


def _placed(part: str, offload) -> tuple[str, ...]:
    """Name an offloaded part with its device. `offload` is DeepSpeed's block for the part, or None."""
    device = "none" if offload is None else getattr(offload.device, "value", offload.device)
    return () if device == "none" else (f"{part}:{device}",)
