"""ZeRO-1, 2 and 3 with CPU and NVMe offload: DeepSpeed's engine, prepared by Accelerate."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param
from torch import Tensor, nn
from torch.nn import functional

from samecurve.engines import deepspeed_introspection
from samecurve.engines.accelerate_engine import AcceleratedEngine
from samecurve.engines.sharded_state import FragmentState, PartitionState
from samecurve.interfaces.engine import dtype_name
from samecurve.interfaces.sharded_state import State
from samecurve.models import compilation
from samecurve.models.weights import build
from samecurve.optim.factory import build_optimizer, parameter_groups, state_names


class ZeroEngine(AcceleratedEngine):
    """DeepSpeed owns backward, clipping, loss scaling and the update; the arithmetic around them is shared."""

    def _prepare(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        model = build(type(self.skeleton), self.skeleton.config, self._construction(config), self.recipe.adapter)
        compilation.prepare(model, self.recipe, self.device)
        # ZeRO-3 replaces every shape by an empty one, so the groups go by the skeleton's
        groups = parameter_groups(model.named_parameters(), self.shapes, self.recipe.optimizer)
        engine, optimizer = self.accelerator.prepare(model, build_optimizer(groups, self.recipe.optimizer))
        deepspeed_introspection.skip_at_smallest_scale(engine)
        return engine, optimizer

    def _construction(self, config: dict) -> AbstractContextManager:
        if self.plan.strategy.zero_stage < 3:
            return torch.device(self.device)
        return deepspeed.zero.Init(config_dict_or_path=config)

    def _accumulating(self, last: bool) -> AbstractContextManager:
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def _backward(self, loss: Tensor, last: bool) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    def _update(self) -> tuple[float, bool]:
        self.model.step()
        return float(self.model.get_global_grad_norm()), self.model.was_step_applied()

    def _may_rescale(self) -> bool:
        return deepspeed_introspection.may_rescale(self.model)

    @property
    def loss_scale_state(self) -> dict:
        return deepspeed_introspection.loss_scale_state(self.model)

    @loss_scale_state.setter
    def loss_scale_state(self, values: dict) -> None:
        deepspeed_introspection.set_loss_scale(self.model, values)

    def _state(self, parameters: dict[str, nn.Parameter]) -> State:
        optimizer, states = self.model.optimizer, state_names(self.recipe.optimizer, self.shapes)
        if self.model.zero_optimization_stage() < 3:
            return FragmentState(parameters, optimizer, states, saved=set(parameters))
        return PartitionState(parameters, optimizer, states, self.shard[0])

    def _write(self, name: str, full: Tensor) -> None:
        """Both the working weight and its fp32 master, which DeepSpeed would otherwise make from the rounded one."""
        tensor = self.tensors[name]
        if not isinstance(tensor, nn.Parameter):
            tensor.copy_(full)
        elif hasattr(tensor, "ds_id"):
            self._write_partitioned(tensor, full, trained=name in self.shapes)
        else:
            tensor.data.copy_(full)
            if name in self.shapes:
                safe_set_full_fp32_param(tensor, full.to(tensor.device))

    def _write_partitioned(self, parameter: nn.Parameter, full: Tensor, trained: bool) -> None:
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if self.accelerator.is_main_process:
                parameter.data.copy_(full)
        if not trained:
            return  # what is frozen has no master
        rank, world = self.shard
        length = -(-full.numel() // world)  # DeepSpeed pads the last partition
        padded = functional.pad(full.flatten(), (0, length * world - full.numel()))
        safe_set_local_fp32_param(parameter, padded.narrow(0, rank * length, length).to(self.device))

    def _read(self, parameter: nn.Parameter) -> Tensor:
        return safe_get_full_fp32_param(parameter)

    def _local_numel(self, parameter: nn.Parameter) -> int:
        return parameter.ds_tensor.ds_numel if hasattr(parameter, "ds_tensor") else parameter.numel()

    def _describe_numbers(self) -> dict:
        return {
            **deepspeed_introspection.numbers(self.model),
            "weight_dtype": dtype_name(self.model.get_data_types()[0]),
            "sharded": hasattr(next(self.model.parameters()), "ds_id"),
            "offload": [*_placed("optimizer", self.model.zero_offload_optimizer()), *self._offloaded_weights()],
        }

    def _offloaded_weights(self) -> list[str]:
        return _placed("param", self.model.zero_offload_param()) if self.model.zero_optimization_stage() == 3 else []


def _placed(part: str, offload) -> list[str]:
    """offload: DeepSpeed's block for that part, or None."""
    device = "none" if offload is None else getattr(offload.device, "value", offload.device)
    return [] if device == "none" else [f"{part}:{device}"]
