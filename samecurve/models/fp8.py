"""fp8 matrix products in the layers' linear modules, through torchao.

The dtypes of weights, gradients and all other operations do not change. Each product rounds its operands to 8 bits
(Micikevicius et al. 2022, arXiv:2209.05433) after scaling them by their current largest value. The recipes differ in
the scope of that value:

tensorwise: the whole matrix. For inputs and gradients that is a micro-batch, so a row's result depends on the
  micro-batch's other rows.
rowwise: each row or column along the summed dimension. A token's result does not depend on the rest of the micro-batch.
  A weight's gradient sums over the micro-batch, with powers of two as scales, under which most numbers round alike.
rowwise_with_gw_hp: as rowwise, with the weight's gradient in bf16, so that a token's contribution to the gradient does
  not depend on the rest of the micro-batch either.

The output head, embeddings and an adapter's matrices are not converted: they are small or, like the head, sensitive to
rounding. torchao also computes the unused gradients of frozen weights.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from samecurve.errors import ConfigurationError
from samecurve.models.activation_checkpointing import layers
from samecurve.models.lora import is_adapter_weight

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

# Both dimensions of a weight have to be multiples of 16 for torch._scaled_mm.
MULTIPLE = 16
# Compute capability of NVIDIA's first devices with fp8 matrix products: Ada and Hopper.
SMALLEST_CAPABILITY = (8, 9)


def check_device(kind: str, device: torch.device) -> None:
    """Raise ConfigurationError if the device has no fp8 products; a CPU emulates them. `kind` is the recipe's fp8."""
    if kind == "off" or device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigurationError(f"fp8: found {kind}, which needs an NVIDIA GPU, but the device is {device}; use off")
    capability = torch.cuda.get_device_capability(device)
    if capability < SMALLEST_CAPABILITY:
        needed, actual = (".".join(map(str, pair)) for pair in (SMALLEST_CAPABILITY, capability))
        raise ConfigurationError(
            f"fp8: found {kind}, which needs a GPU of compute capability {needed} or more, but "
            f"{torch.cuda.get_device_name(device)} has {actual}; use off"
        )


def converted(model: nn.Module) -> list[str]:
    """List the names of the modules that `convert` converts. Raises as activation_checkpointing.layers."""
    inside = {id(module) for layer in layers(model) for module in layer.modules()}
    return [
        name
        for name, module in model.named_modules()
        if id(module) in inside
        and type(module) is nn.Linear
        and not is_adapter_weight(f"{name}.weight")
        and not any(size % MULTIPLE for size in module.weight.shape)
    ]


def count(model: nn.Module, kind: str) -> int:
    """Count the modules that `convert` converts. `kind` is the recipe's fp8."""
    return 0 if kind == "off" else len(converted(model))


def convert(model: nn.Module, recipe: Recipe, device: torch.device) -> None:
    """Convert linear modules to the recipe's fp8, in place, before activation checkpointing and compilation.

    Names and parameters stay unchanged.

    Raises:
        ConfigurationError: no module can be converted, or as `converted`.
    """
    if recipe.fp8 == "off":
        return
    names = set(converted(model))
    if not names:
        raise ConfigurationError(
            f"fp8: found {recipe.fp8}, but the layers of {type(model).__name__} have no torch.nn.Linear with "
            f"both sides a multiple of {MULTIPLE}; use off"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe.fp8),
        emulate=device.type == "cpu",
        pad_inner_dim=pads_inner_dimension(recipe),
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in names)
    for name in names:
        module = model.get_submodule(name)
        module.forward = MethodType(_forward, module)


def pads_inner_dimension(recipe: Recipe) -> bool:
    """Whether to pad the number of tokens to the MULTIPLE that a weight's gradient needs; padding costs a copy.

    A step's last micro-batch may have fewer rows than the others.
    """
    return not recipe.data.packing or recipe.batch.sequence_length % MULTIPLE != 0


def _forward(self: nn.Linear, inputs: Tensor) -> Tensor:
    """Compute (..., in_features) -> (..., out_features) in bf16, like torchao's forward (0.18) with bf16 operands.

    torchao's own forward rounds an fp32 weight directly to fp8, so that a weight sharded and gathered in bf16 would
    give another result. torchao also checks only a GPU's autocast state.
    """
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    with torch.autocast(inputs.device.type, enabled=False):
        inputs, weight = inputs.to(torch.bfloat16), self.weight.to(torch.bfloat16)
        outputs = matmul_with_hp_or_float8_args.apply(inputs, weight.t(), self.linear_mm_config, self.config)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)
