"""Activation checkpointing: fewer stored activations in exchange for recomputation or copies to host memory.

A layer is an instance of transformers' GradientCheckpointingLayer, the repeated layer of a decoder or encoder. Only the
layers' `forward` is wrapped, so that modules, weight names and a strategy's hooks stay unchanged. Those hooks run once,
outside the recomputed part.

full and every_n_layers follow Chen et al. 2016, arXiv:1604.06174. selective follows Korthikanti et al. 2022,
arXiv:2205.05198, here by operator. Recomputation repeats the dropout, a function of the row and the step, without
the random state: its copies between GPU and host would make each layer wait. dropout.py refuses other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from samecurve.errors import ConfigurationError
from samecurve.models.activation_offload import Offload, copies_of
from samecurve.models.attention import varlen

if TYPE_CHECKING:
    from samecurve.config.schema import Memory

Forward = Callable[..., object]

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# without bmm, the product of eager attention, whose results grow with the square of the sequence length
_PRODUCTS = ("mm", "addmm", "_scaled_mm")


def layers(model: nn.Module) -> list[nn.Module]:
    """List the repeated layers in execution order, without layers nested in other ones.

    Raises:
        ConfigurationError: there are none, because the model's code is older than transformers' base class for them.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    by_name: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in by_name)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            by_name[name] = module
    if not by_name:
        raise ConfigurationError(
            f"model: {type(model).__name__} has no GradientCheckpointingLayer, by which transformers marks a "
            "model's layers; set memory.activation_checkpointing to none, and compile and fp8 to off"
        )
    return list(by_name.values())


def checkpoint_layers(model: nn.Module, memory: Memory) -> None:
    """Install activation checkpointing, in place, in every layer that `recomputed` selects. Raises as `layers`."""
    kind = memory.activation_checkpointing
    if kind == "none":
        return
    repeated = layers(model)
    # reentrant checkpointing needs an input with a gradient, which the first layer of a model with an adapter lacks
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if kind == "selective":
        recompute = partial(recompute, context_fn=_contexts(memory.selective_save))
    offload = Offload()

    def recompute_from_host(forward: Forward, *args, **kwargs):
        # hidden states are the first argument by position, as transformers' own checkpointing demands
        with offload.of_layer(copies_of(args[0].device)):
            return recompute(forward, *args, **kwargs)

    for index in recomputed(memory, len(repeated)):
        layer = repeated[index]
        recomputing = recompute_from_host if kind == "offload" else recompute
        layer.forward = _in_training(layer, partial(recomputing, layer.forward))


def recomputed(memory: Memory, num_layers: int) -> range:
    """Return the indices of the layers with activation checkpointing."""
    if memory.activation_checkpointing == "none":
        return range(0)
    return range(0, num_layers, memory.every_n_layers if memory.activation_checkpointing == "every_n_layers" else 1)


def repeated_share(memory: Memory, model: nn.Module, attention: str) -> tuple[float, float]:
    """Compute the shares, 0 to 1, of the layers' forward FLOPs that are recomputed.

    Other recomputed operations (norms, activation functions) are not counted as FLOPs.

    Args:
        memory: the recipe's memory settings.
        model: the model.
        attention: the attention implementation.

    Returns:
        (share of the matrix products with weights, share of attention's products).
    """
    if memory.activation_checkpointing == "none":
        return 0.0, 0.0
    num_layers = len(layers(model))
    share = len(recomputed(memory, num_layers)) / num_layers
    if memory.activation_checkpointing != "selective":
        return share, share
    products = 0.0 if memory.selective_save == "matmul" else share
    return products, share if attention == "eager" else 0.0


def _in_training(layer: nn.Module, recomputing: Forward) -> Forward:
    """Call `recomputing` in training only; evaluation stores no activations anyway."""
    plain = layer.forward

    @wraps(plain)
    def forward(*args, **kwargs):
        chosen = recomputing if layer.training and torch.is_grad_enabled() else plain
        return chosen(*args, **kwargs)

    return forward


@cache
def _contexts(keeps: str) -> Callable:
    """Return one object for all layers, because torch.compile would recompile for a new object."""
    names = _ATTENTION if keeps == "attention" else _ATTENTION + _PRODUCTS
    operators = {getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)}
    kept = frozenset(operators | {torch.ops.higher_order.flex_attention, *varlen.OPERATORS})
    return partial(create_selective_checkpoint_contexts, partial(_policy, kept=kept))


def _policy(context, operator, *args, kept: frozenset, **kwargs) -> CheckpointPolicy:
    """Decide whether an operator's result is saved. flash-attn's operators exist only if its package is installed."""
    keep = operator in kept or getattr(operator, "namespace", "") == "flash_attn"
    # torch.compile may override PREFER_RECOMPUTE, but not MUST_SAVE
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
