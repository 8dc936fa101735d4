"""Computation in bf16 copies of fp32 weights, each made for the length of one layer's forward pass.

That is FSDP2's mixed precision without shards: what goes from layer to layer is bf16, where autocast keeps it in fp32,
and gradients are added up in fp32, because the cast is part of the graph. Loss and gradients are FSDP's bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from samecurve.errors import ConfigurationError
from samecurve.models import fp32_weights
from samecurve.models.activation_checkpointing import layers

_Weights = tuple[tuple[tuple[str, str], ...], ...]
"""(path of a module, name in it) of all places of each weight. Alike layers have equal ones and share compiled code."""


def install_in_layers(model: nn.Module) -> None:
    """Make each repeated layer compute in bf16, in place. Recomputation that is installed later casts anew.

    Compiled recomputation refuses side effects; these are undone at the end of the forward pass.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    kept = fp32_weights.parameters(model, "bf16")
    for layer in _layers(model):
        _install(layer, _weights(layer, kept))


def install_around(model: nn.Module) -> None:
    """Make the model's other modules compute in bf16, in place. Call after the loss is installed in its forward."""
    inside = {module for layer in _layers(model) for module in layer.modules()}
    _install(model, _weights(model, fp32_weights.parameters(model, "bf16"), inside))


def _layers(model: nn.Module) -> list[nn.Module]:
    try:
        return layers(model)
    except ConfigurationError:  # the model's code does not mark them
        return []


def _weights(module: nn.Module, kept: Collection[nn.Parameter], without: Collection[nn.Module] = ()) -> _Weights:
    """List the places of each floating-point weight; not of those `kept` in fp32, quantized or of modules `without`."""
    places: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for path, owner in module.named_modules():
        for name, weight in owner._parameters.items():
            # bf16 already: frozen weights (fp32_weights.py) and those of adamw_bf16, whose copy takes no memory
            if weight is None or weight in kept or owner in without:
                continue
            if weight.dtype in (torch.float32, torch.bfloat16):
                places.setdefault(weight, []).append((path, name))
    return tuple(map(tuple, places.values()))


def _install(module: nn.Module, weights: _Weights) -> None:
    for owner, name in _places(module, weights):
        owner.__dict__[name] = owner._parameters[name]
    plain = module.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _in_bf16(module, weights):
            return plain(*args, **kwargs)

    module.forward = forward


def _places(module: nn.Module, weights: _Weights) -> Iterator[tuple[nn.Module, str]]:
    return ((module.get_submodule(path), name) for places in weights for path, name in places)


@contextmanager
def _in_bf16(module: nn.Module, weights: _Weights) -> Iterator[None]:
    """Shadow each weight by a copy: an attribute of the module itself is found before its parameter of that name.

    So `parameters()` still lists the weights, with their hooks. Afterwards each weight shadows itself: torch.compile of
    PyTorch 2.11 cannot remove an attribute, and one that comes and goes would be compiled twice.
    """
    for places in weights:
        owners = [module.get_submodule(path) for path, _ in places]
        weight = owners[0]._parameters[places[0][1]]
        assert weight is not None
        copy = weight.to(torch.bfloat16)
        for owner, (_, name) in zip(owners, places, strict=True):
            owner.__dict__[name] = copy
    try:
        yield
    finally:
        for owner, name in _places(module, weights):
            owner.__dict__[name] = owner._parameters[name]
