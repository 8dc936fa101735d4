"""Frozen weights in the dtype that they are computed in: half the memory of fp32, and no cast at each use."""

from __future__ import annotations

import torch
from torch import nn

from samecurve.config.schema import Recipe


def store_in_bf16(model: nn.Module, recipe: Recipe) -> None:
    """Store the frozen weights of linear layers in bf16, in place, where bf16 is what every use casts them to.

    Autocast does so with precision bf16, hence nothing that is computed changes. Other layers stay: an embedding's
    output would go on in bf16. With DoRA all stay, because peft computes norms in the weights' own dtype.
    """
    if recipe.precision != "bf16" or recipe.adapter.dora:
        return
    linear = [module for module in model.modules() if type(module) is nn.Linear]  # no fp8 and no quantized layers
    others = (module for module in model.modules() if type(module) is not nn.Linear)
    shared = {parameter for module in others for parameter in module.parameters(recurse=False)}
    for module in linear:
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad and parameter not in shared:
                parameter.data = parameter.data.to(torch.bfloat16)
