"""Matrix products of 8-bit floating-point numbers in the layers' linear modules, through torchao.

Weights, gradients and everything between those modules stay what they are without it. Each product rounds its operands
to 8 bits (Micikevicius et al. 2022, arXiv:2209.05433) after scaling them by their largest value, taken anew each time:

tensorwise: of the whole matrix. Of inputs and gradients that is a micro-batch, whose other rows a row's result then
  depends on.
rowwise: of each row or column that is summed over. A token's result is its own, whatever else is in the micro-batch;
  a weight's gradient sums over that, with scales that are powers of two, under which most numbers are rounded alike.
rowwise_with_gw_hp: the same, with the weight's gradient in bf16, so that a token's part in it is its own, too.

The output head, embeddings and an adapter's matrices are left out: small, or, as the head, sensitive to rounding. Of a
frozen weight torchao computes the gradient, too, which nobody takes.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from samecurve.errors import ConfigurationError
from samecurve.models.activation_checkpointing import layers
from samecurve.models.lora import is_adapters

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

# of both sides of a weight; torch._scaled_mm takes no others
MULTIPLE = 16
# of NVIDIA's devices, the first ones that multiply 8-bit floating-point numbers: Ada and Hopper
SMALLEST_CAPABILITY = (8, 9)


def check_device(kind: str, device: torch.device) -> None:
    """Raises ConfigurationError where the device has no such products. A CPU emulates them. kind: the recipe's fp8."""
    if kind == "off" or device.type == "cpu":
        return
    if device.type != "cuda":
        raise ConfigurationError(f"fp8: found {kind}, which needs an NVIDIA GPU, and the device is {device}; use off")
    capability = torch.cuda.get_device_capability(device)
    if capability < SMALLEST_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (SMALLEST_CAPABILITY, capability))
        raise ConfigurationError(
            f"fp8: found {kind}, which needs a GPU of compute capability {needed} or more, and "
            f"{torch.cuda.get_device_name(device)} has {found}; use off"
        )


def converted(model: nn.Module) -> list[str]:
    """The names of the modules that `convert` takes. Raises what `activations.layers` does."""
    inside = {id(module) for layer in layers(model) for module in layer.modules()}
    return [name for name, module in model.named_modules() if id(module) in inside and _fits(name, module)]


def count(model: nn.Module, kind: str) -> int:
    """How many modules are converted. kind: the recipe's fp8."""
    return 0 if kind == "off" else len(converted(model))


def _fits(name: str, module: nn.Module) -> bool:
    if type(module) is not nn.Linear or is_adapters(f"{name}.weight"):
        return False
    return not any(size % MULTIPLE for size in module.weight.shape)


def convert(model: nn.Module, recipe: Recipe, device: torch.device) -> None:
    """As the recipe asks, in place and before activation checkpointing and compilation.

    Names and parameters stay. Raises ConfigurationError where no module fits, and what `converted` does.
    """
    if recipe.fp8 == "off":
        return
    names = set(converted(model))
    if not names:
        raise ConfigurationError(
            f"fp8: found {recipe.fp8}, but the layers of {type(model).__name__} have no torch.nn.Linear whose sides "
            f"are multiples of {MULTIPLE}; use off"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe.fp8), emulate=device.type == "cpu", pad_inner_dim=_pads(recipe)
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in names)
    for name in names:
        module = model.get_submodule(name)
        module.forward = MethodType(_forward, module)


def _pads(recipe: Recipe) -> bool:
    """A weight's gradient sums over the tokens, whose number has to be a multiple, too; padding costs a copy."""
    tokens = recipe.batch.micro_batch_size * recipe.batch.sequence_length
    return not recipe.data.packing or tokens % MULTIPLE != 0


def _forward(self: nn.Module, inputs: Tensor) -> Tensor:
    """(..., in_features) to (..., out_features), bf16. As torchao's own (0.18), but both operands are bf16 first.

    Its own would round an fp32 weight at once, so that one that was sharded and gathered in bf16 came out elsewhere;
    and it asks for a GPU's autocast only.
    """
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    with torch.autocast(inputs.device.type, enabled=False):
        inputs, weight = inputs.to(torch.bfloat16), self.weight.to(torch.bfloat16)
        outputs = matmul_with_hp_or_float8_args.apply(inputs, weight.t(), self.linear_mm_config, self.config)
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)
