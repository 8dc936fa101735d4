"""Tensor parallelism by transformers' own plan for an architecture, applied to a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from samecurve.errors import ConfigurationError
from samecurve.models import dropout
from samecurve.optim.dtensor import local_gradient
from samecurve.specs.model_families import TENSOR_PARALLEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.engines.mesh import Mesh
    from samecurve.strategy.plan import Strategy

KEY = "parallelism_config.parallelism_config_tp_size"
# transformers sums these gradients in a hook after each backward pass, and with accumulation what was summed already
_SUMMED_HERE = "replicated_with_grad_allreduce"


def check(model: PreTrainedModel, strategy: Strategy) -> None:
    """Check that the strategy can cut this architecture, before any weight is loaded.

    Raises:
        ConfigurationError: the family is untested, sizes do not divide, or the model has dropout.
    """
    config, size, found = model.config.get_text_config(), strategy.tensor_parallel_size, []
    family = model.config.model_type
    if family not in TENSOR_PARALLEL:
        text = f"{family} has not been tested under tensor parallelism; use {', '.join(sorted(TENSOR_PARALLEL))}"
        raise ConfigurationError(f"{strategy.path}: {KEY}: found {size}, but {text}, or configs/fsdp.yaml")
    plan = _resolve(model, size)
    by_head = any(style == "colwise" and name.endswith("k_proj") for name, style in plan.items())
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    counts = heads if by_head else {}
    counts |= {"vocab_size": config.vocab_size, "intermediate_size": config.intermediate_size}
    for name, count in counts.items():
        if count % size:
            sizes = [each for each in range(1, count + 1) if all(other % each == 0 for other in counts.values())]
            text = f"the model's {name} is {count}, which {size} does not divide"
            fix = f"use a size that divides all of its sizes: {', '.join(map(str, sizes[:12]))}"
            found.append(f"found {size}, but {text}; {fix}")
    if rates := dropout.rates(model.config):
        named = ", ".join(f"{key} {rate}" for key, rate in rates.items())
        text = "each rank would drop other values than one process; set the rates to 0 in model.config"
        found.append(f"found {size}, but the model has dropout ({named}) and {text}, or use configs/fsdp.yaml")
    if found:
        raise ConfigurationError("\n".join(f"{strategy.path}: {KEY}: {text}" for text in found))


def apply(model: PreTrainedModel, mesh: Mesh) -> list[str]:
    """Cut the weights of the model, on the meta device, over the mesh's dimension `tp`, and change its layers in place.

    Returns:
        The names of the parameters whose gradient is a sum over the ranks, see `sum_gradients`.
    """
    plan = _resolve(model, mesh.dims.tp)
    summed = [name for name, style in plan.items() if style == _SUMMED_HERE]
    apply_tensor_parallelism(model, mesh.devices["tp"], {name: s for name, s in plan.items() if s != _SUMMED_HERE})
    model.tie_weights()  # the embedding's weight has been replaced
    return [name for name, _ in model.named_parameters() if name in summed]


def _resolve(model: PreTrainedModel, size: int) -> dict[str, str]:
    """Return the style of each module and parameter of the model that is cut, by name."""
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=size))
    known = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    return {name: style for name, style in plan.items() if name in known}  # a tied head's weight has another name


def allocate(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Allocate this rank's part of the weights, uninitialized, where nothing else shards the model."""
    model.to_empty(device=device)
    model.tie_weights()  # allocation may have given each of two tied modules its own parameter
    return model


def sum_gradients(weights: Sequence[Tensor], mesh: Mesh) -> None:
    """Sum the gradients of replicated weights that each rank applies to its own heads alone. Once per step."""
    for weight in weights:
        if weight.grad is not None:
            dist.all_reduce(local_gradient(weight), group=mesh.devices["tp"].get_group())


def cut_size(weights: Mapping[str, nn.Parameter]) -> int:
    """Return the number of ranks over which tensor parallelism has cut weights; 1 if none is cut."""
    for weight in weights.values():
        if isinstance(weight, DTensor):
            names = weight.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, weight.placements, strict=True):
                if name == "tp" and not placement.is_replicate():
                    return weight.device_mesh["tp"].size()
    return 1


def groups_by_mesh(groups: list[dict]) -> list[dict]:
    """Divide an optimizer's parameter groups, because one fused update takes the weights of one mesh only."""
    found = []
    for group in groups:
        by_mesh: dict[object, list[Tensor]] = {}
        for weight in group["params"]:
            by_mesh.setdefault(weight.device_mesh if isinstance(weight, DTensor) else None, []).append(weight)
        found += [{**group, "params": weights} for weights in by_mesh.values()]
    return found
