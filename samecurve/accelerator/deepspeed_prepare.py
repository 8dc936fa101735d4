"""What a script's model is handed to DeepSpeed with, and what it may ask of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import ref

import accelerate
import torch
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.deepspeed import (  # not in utils without DeepSpeed
    DummyOptim,
    DummyScheduler,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from samecurve.accelerator import deepspeed_introspection
from samecurve.errors import ConfigurationError

_OF_MATRICES = ("Adafactor", "LBFGS", "Muon")  # ZeRO gives an optimizer one flat part of all weights


class DeepSpeedPrepare(accelerate.Accelerator):
    """The part of samecurve.Accelerator that hands a model to DeepSpeed, and refuses what DeepSpeed does otherwise."""

    _is_script: bool
    _weights: tuple[ref[Tensor], ...] = ()  # of the optimizer; they do not outlive `free_memory`

    def _check_parts(self, prepared: tuple) -> None:
        """Raise ConfigurationError if `prepare` would leave out a script's optimizer or scheduler.

        Accelerate hands DeepSpeed the last one of a call, returns it for all, and leaves one without a model as it is.
        """
        if not self._is_script or self.deepspeed_plugin is None:
            return
        new = [part for part in prepared if not getattr(part, "_is_accelerate_prepared", False)]
        optimizers = [part for part in new if isinstance(part, torch.optim.Optimizer | DummyOptim)]
        schedulers = [part for part in new if isinstance(part, LRScheduler | DummyScheduler)]
        for kind, parts, known, instead in (
            ("optimizers", optimizers, self._optimizers, "give the weights to one, in groups with rates of their own"),
            ("schedulers", schedulers, self._schedulers, "give LambdaLR a function for each group"),
        ):
            if parts and (count := len(parts) + len(known)) > 1:
                raise ConfigurationError(f"prepare: found {count} {kind}, but DeepSpeed trains with one; {instead}")
        has_model = any(isinstance(part, nn.Module) for part in new)
        if (optimizers and not has_model) or (schedulers and not (has_model and optimizers)):
            raise ConfigurationError(
                "prepare: DeepSpeed takes model, optimizer and scheduler in one call; "
                "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)"
            )

    def _begin_deepspeed(self, model: nn.Module, prepared: tuple) -> None:
        plugin: Any = self.deepspeed_plugin
        deepspeed_introspection.complete_config(plugin, model, prepared, self.num_processes)
        for optimizer in (part for part in prepared if isinstance(part, torch.optim.Optimizer | DummyOptim)):
            self.deepspeed_engine_wrapped = None  # `backward` is of the model that is trained
            groups = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
            groups = [group["params"] if isinstance(group, dict) else [group] for group in [*groups]]
            self._weights = tuple(ref(weight) for group in groups for weight in group)
            if self._is_script and isinstance(optimizer, torch.optim.Optimizer):
                _keep_optimizer(plugin.deepspeed_config, optimizer, self.is_main_process)
        if self._is_script and self.mixed_precision in ("bf16", "fp16"):  # a script's loss is fp32, as after autocast
            whole: Any = model
            whole._original_forward, whole.forward = model.forward, convert_outputs_to_fp32(model.forward)

    def _check_clipped(self, parameters: Iterable[Tensor], norm_type: float) -> None:
        """Raise ConfigurationError unless these are what DeepSpeed clips: the optimizer's weights, by their L2 norm."""
        given = {id(weight) for weight in parameters if weight.requires_grad}
        weights = [weight() for weight in self._weights]
        trained = {id(weight) for weight in weights if weight is not None and weight.requires_grad}
        if norm_type != 2:
            raise ConfigurationError(
                f"clip_grad_norm_: found norm_type {norm_type}, but DeepSpeed clips by the L2 norm"
            )
        if given != trained:
            raise ConfigurationError(
                f"clip_grad_norm_: found {len(trained - given)} weights of the optimizer left out, and "
                f"{len(given - trained)} that it does not train; DeepSpeed clips all of the optimizer's together. "
                "Give it model.parameters(), and freeze what no group has by requires_grad_(False)"
            )


def _keep_optimizer(config: dict[str, Any], optimizer: torch.optim.Optimizer, is_main: bool) -> None:
    """Let DeepSpeed train with the script's own optimizer, where Accelerate would make another one of it.

    For an offloaded optimizer Accelerate makes DeepSpeed's Adam of whatever it does not know
    (map_pytorch_optim_to_deepspeed in utils/deepspeed.py, 1.15).

    Raises:
        ConfigurationError: DeepSpeed cannot run it.
    """
    zero, name = config.get("zero_optimization", {}), type(optimizer).__name__
    offload = zero.get("offload_optimizer") or {}
    if zero.get("stage", 0) and name in _OF_MATRICES:
        raise ConfigurationError(
            f"optimizer: found {name}, which computes with whole weights, but ZeRO gives it flat parts of them; "
            "use torch.optim.AdamW, or DDP"
        )
    if offload.get("device", "none") == "none" or _is_adam(optimizer):
        return
    if type(optimizer).__module__.startswith("bitsandbytes") or offload.get("ratio", 1.0) != 1.0:
        raise ConfigurationError(
            f"offload_optimizer: found the optimizer {name}, of which DeepSpeed would make an Adam, on the CPU or, by "
            "`ratio`, beside it; use torch.optim.AdamW, or leave offload_optimizer or its ratio out"
        )
    is_deepspeeds = type(optimizer).__module__.startswith("deepspeed")
    if is_main and config.get("zero_force_ds_cpu_optimizer", True) and not is_deepspeeds:
        message = f"offload_optimizer: DeepSpeed has no {name} of these options; the script's own runs on the CPU"
        warnings.warn(message, stacklevel=4)
    config["zero_force_ds_cpu_optimizer"] = False


def _is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether DeepSpeedCPUAdam, as Accelerate makes one of it, computes the same."""
    decoupled = type(optimizer) is torch.optim.AdamW
    return (decoupled or type(optimizer) is torch.optim.Adam) and not any(
        group["amsgrad"] or group["maximize"] or group.get("decoupled_weight_decay", decoupled) != decoupled
        for group in optimizer.param_groups
    )
