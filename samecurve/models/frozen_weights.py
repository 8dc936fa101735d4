"""Frozen weights in the dtype that they are computed in: half the memory of fp32, and no cast at each use."""

from __future__ import annotations

import torch
from torch import nn

from samecurve.config.schema import Recipe
from samecurve.models import fp32_weights


def store_in_bf16(model: nn.Module, recipe: Recipe, everywhere: bool = False) -> None:
    """Store frozen weights in bf16, in place, where every use casts them to bf16: no result changes.

    With DoRA all stay fp32, because peft computes norms in the weights' own dtype.

    Args:
        model: the model, before a strategy wraps it.
        recipe: its recipe; only with precision bf16 is anything stored.
        everywhere: whether the model computes in bf16 throughout (FSDP2's mixed precision, bf16 copies). Autocast casts
            the weights of linear layers only; a bf16 embedding would change the dtype of the activations.
    """
    if recipe.precision != "bf16" or recipe.adapter.dora:
        return
    linear = [module for module in model.modules() if type(module) is nn.Linear]  # no fp8 and no quantized layers
    # a tied head is a linear layer whose weight is also the embedding's
    others = (module for module in model.modules() if type(module) is not nn.Linear)
    shared = {parameter for module in others for parameter in module.parameters(recurse=False)}
    weights = model.parameters() if everywhere else (p for module in linear for p in module.parameters(recurse=False))
    kept = fp32_weights.parameters(model, recipe.precision)
    for parameter in (parameter for parameter in weights if parameter not in kept):
        quantized = parameter.dtype != torch.float32
        if not parameter.requires_grad and not quantized and (everywhere or parameter not in shared):
            parameter.data = parameter.data.to(torch.bfloat16)
