"""Weights that a model computes with in fp32 whatever its precision, and their exact values under DeepSpeed.

They are few: what transformers marks (PreTrainedModel._keep_in_fp32_modules_strict, and _keep_in_fp32_modules for fp16
alone), for example routers, and the parameters of a recurrence (specs/optimizers.py), which transformers uses in
fp32 but does not mark: a decay of 0.999 per token is 0.996 in bf16. So are weights that the family itself does not
train, such as a router's bias. Other frozen weights, which need no more than the dtype that they are computed in, are
stored in that: half the memory of fp32, and no cast at each use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samecurve.config.schema import Optimizer, Recipe
from samecurve.models.pretrained import constants
from samecurve.specs.optimizers import RECURRENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def names(model: nn.Module, precision: str) -> set[str]:
    """Find the names of a model's weights that are computed in fp32 though its precision is bf16 or fp16."""
    if precision == "fp32":
        return set()
    marks = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    marks |= {*((getattr(model, "_keep_in_fp32_modules", None) or ()) if precision == "fp16" else ())}
    # as core_model_loading.build_glob_alternation of transformers
    frozen = constants(model)  # such as a router's bias
    marked = re.compile("|".join(mark.replace("*", ".*") for mark in marks)) if marks else None
    return {
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point()
        and (name in frozen or name.rpartition(".")[2] in RECURRENT or (marked is not None and marked.search(name)))
    }


def parameters(model: nn.Module, precision: str) -> set[nn.Parameter]:
    """Return the parameters of `names`."""
    kept = names(model, precision)
    return {weight for name, weight in model.named_parameters() if name in kept}


def cast_weights(model: PreTrainedModel, settings: Optimizer) -> PreTrainedModel:
    """Cast the weights, in place, to bf16 for adamw_bf16, but not those of `names`; buffers are not changed."""
    if settings.name == "adamw_bf16":
        # not model.to, which would also round buffers, such as the frequencies of rotary embeddings
        kept = parameters(model, "bf16")
        for parameter in filter(torch.is_floating_point, model.parameters()):
            if parameter not in kept:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def fill_buffer(buffer: Tensor, full: Tensor, stated: Tensor) -> None:
    """Give a live buffer its value, in the dtype that the skeleton's, `stated`, has.

    A model that DeepSpeed divides while it is built has buffers of DeepSpeed's dtype: in bf16 the angle of a rotary
    embedding is wrong by a radian at position 2,000.
    """
    buffer.data = full.to(buffer.device, stated.dtype)


class ExactValues:
    """Exact fp32 values of some weights, beside working weights that DeepSpeed rounds to 16 bits.

    The weight's module computes with the exact value, and the working weight gets the gradient. The values are few and
    small, so each rank has all of them.

    Args:
        shapes: full shape of each weight by name, because ZeRO-3 partitions the weights themselves.
        device: of the values.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device):
        self.values = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}

    def install(self, model: nn.Module) -> None:
        """Make the modules that own the weights compute with the exact values, in place."""
        owned: dict[str, dict[str, Tensor]] = {}
        for name, value in self.values.items():
            path, _, own = name.rpartition(".")
            owned.setdefault(path, {})[own] = value
        if owned:  # the attributes are restored at the end of each forward pass, see bf16_copies.py
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        for path, values in owned.items():
            module = model.get_submodule(path)
            module.__dict__.update({own: module._parameters[own] for own in values})
            module.forward = _with_values(module, values)


def _with_values(module: nn.Module, values: Mapping[str, Tensor]) -> Callable:
    plain = module.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for own, value in values.items():
            weight = module._parameters[own]
            assert weight is not None
            working = weight.float()
            # an attribute of the module itself is found before its parameter; the sum is the value without rounding
            module.__dict__[own] = working + (value - working).detach()
        try:
            return plain(*args, **kwargs)
        finally:
            module.__dict__.update({own: module._parameters[own] for own in values})

    return forward


def store_frozen_in_bf16(model: nn.Module, recipe: Recipe, everywhere: bool = False) -> None:
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
    kept = parameters(model, recipe.precision)
    for parameter in (parameter for parameter in weights if parameter not in kept):
        quantized = parameter.dtype != torch.float32
        if not parameter.requires_grad and not quantized and (everywhere or parameter not in shared):
            parameter.data = parameter.data.to(torch.bfloat16)
