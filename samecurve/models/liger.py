"""Fused Triton kernels of liger-kernel for norms, rotary positions and gated activations.

Each kernel makes one pass over memory where PyTorch needs several (Hsu et al., 2024, arXiv:2410.10989). Liger's own
list decides what is replaced in which model family. Modules keep their names and weights but get another
forward. Liger also patches the family's Python module for the whole process: the function that rotates queries and
keys, and the classes. A teacher of the same family that is built later therefore consists of Liger's classes. Liger's
losses stay disabled, because samecurve computes the loss (loss.implementation: liger is a separate key, see
chunked_cross_entropy.py).
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from samecurve.errors import ConfigurationError
from samecurve.models.hf_config import reason
from samecurve.specs.model_families import allow, families

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

_OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}
Activation = Callable[[Tensor], Tensor]
# Activations that Liger modules compute whatever activation they replace, by a part of the Liger module's name.
_ACTIVATIONS: dict[str, Activation] = {
    "SwiGLU": functional.silu,
    "GEGLU": partial(functional.gelu, approximate="tanh"),
    "ReLUSquared": lambda inputs: functional.relu(inputs).square(),
}


def check_device(recipe: Recipe, device: torch.device) -> None:
    """Raise ConfigurationError if the recipe requests Liger's kernels and Triton does not support the device."""
    asked = (
        ("model.kernels", recipe.model.kernels, "torch"),
        ("loss.implementation", recipe.loss.implementation, "auto"),
    )
    for key, value, instead in asked:
        if value == "liger" and device.type not in ("cuda", "xpu"):
            raise ConfigurationError(
                f"{key}: found liger, but its Triton kernels run on a GPU only and the device is {device}; use "
                f"{instead}"
            )


def check_family(kind: str, model_type: str, uses: list[str] | None = None) -> None:
    """Raise ConfigurationError if Liger's kernels cannot be imported or were not verified for the model family.

    `kind` is the recipe's model.kernels, `uses` see `model_families.allow`.
    """
    if kind == "torch":
        return
    if model_type not in families("liger"):
        allow(
            uses,
            f"Liger's kernels in a {model_type}; compare the loss with that of a run with model.kernels=torch",
            f"model.kernels: found liger, which is supported for {', '.join(sorted(families('liger')))} only, not for "
            f"{model_type}; use torch",
            model_type in families("fails_with_liger"),
        )
    try:
        import_module("liger_kernel.transformers.monkey_patch")
    except Exception as error:  # Liger needs Triton and a certain range of transformers' versions
        raise ConfigurationError(
            f"model.kernels: found liger, but liger-kernel cannot be imported ({reason(error)}); install a version "
            "that fits, or use torch"
        ) from error


def replace(model: PreTrainedModel, kind: str) -> None:
    """Replace modules by Liger's, in place, before activation checkpointing and compilation.

    `kind` is the recipe's model.kernels.

    Raises:
        ConfigurationError: Liger does not support the model, replaces nothing, or would compute another activation.
    """
    if kind == "torch":
        return
    check_family(kind, model.config.model_type)
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # Liger warns about each implementation for other devices and packages
    logging.getLogger("liger_kernel.backends.registry").setLevel(logging.ERROR)
    text = f"model.kernels: found liger, which replaces nothing of a {type(model).__name__}"
    activations = ((name, _activation(module)) for name, module in model.named_modules())
    before = {name: own for name, own in activations if own and not type(own).__name__.startswith("Liger")}
    try:
        _apply_liger_kernel_to_instance(model=model, **_OFF)
    except (AttributeError, NotImplementedError, TypeError) as error:  # a head or a variant unknown to Liger
        raise ConfigurationError(f"{text} ({reason(error)}); use torch") from error
    if not replaced(model):
        raise ConfigurationError(f"{text}; use torch")
    # Liger may replace an activation by a different one. Seen with liger-kernel 0.8.5: a Llama with hidden_act gelu is
    # computed with SiLU afterwards, and every Nemotron with squared ReLU.
    inputs = torch.linspace(-4, 4, 17)
    for name, own in before.items():
        module = model.get_submodule(name)
        kinds = module._get_name(), type(_activation(module)).__name__
        for kind in (kind for kind in kinds if kind.startswith("Liger")):
            ligers = [function for part, function in _ACTIVATIONS.items() if part in kind]
            if ligers and not torch.allclose(own(inputs), ligers[0](inputs), atol=1e-6):
                raise ConfigurationError(
                    f"model.kernels: found liger, whose {kind} has a fixed activation, but {name} uses "
                    f"{type(own).__name__}; use torch"
                )


def _activation(module: nn.Module) -> Activation | None:
    return getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)


def replaced(model: nn.Module) -> list[str]:
    """Inspect the model for Liger's replacements: the number of modules of each kind, and functions by name."""
    # Liger changes instances, not their classes, and gives them a _get_name of its own
    names = (module._get_name() for module in model.modules())
    modules = Counter(name for name in names if name.startswith("Liger"))
    if not modules:
        return []
    # functions are in the Python modules of the model's class and its bases: FSDP puts its own class before them
    files = {parent.__module__ for parent in type(model).__mro__ if parent.__module__.startswith("transformers.")}
    members = (item for file in sorted(files) for item in vars(sys.modules[file]).items())
    rotary = [(name, value) for name, value in members if "rotary" in name and callable(value)]
    functions = [
        name for name, value in rotary if (getattr(value, "__module__", None) or "").startswith("liger_kernel.")
    ]
    return [*(f"{count} {name}" for name, count in sorted(modules.items())), *functions]
