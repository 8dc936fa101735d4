"""What a model keeps of its forward pass for its backward pass: all of it, or less, at the price of work or copies.

A layer is what transformers repeats (its GradientCheckpointingLayer): a decoder's or an encoder's. Only the layers'
`forward` is wrapped, so modules, the names of their weights and the hooks of a strategy stay as they are, and those
hooks run once, outside of what is recomputed.

full, every_n_layers: Chen et al. 2016, arXiv:1604.06174. selective: Korthikanti et al. 2022, arXiv:2205.05198, here by
operator. A layer that is recomputed draws the random numbers of its dropout again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from samecurve.errors import ConfigurationError
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
# not bmm: it is the product of eager attention, whose results grow with the square of the sequence
_PRODUCTS = ("mm", "addmm", "_scaled_mm")


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers in the order in which they run, those inside another one left out.

    ConfigurationError where there are none: the model's code is older than transformers' base class for them.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not inside:
            found[name] = module
    if not found:
        raise ConfigurationError(
            f"model: {type(model).__name__} has no layer of transformers' GradientCheckpointingLayer, so neither "
            "memory.activation_checkpointing nor compile: regional nor fp8 can find its layers; use none and off"
        )
    return list(found.values())


def checkpoint_layers(model: nn.Module, memory: Memory) -> None:
    """Let every layer that `recomputed` names keep less, in place. Raises what `layers` does."""
    kind = memory.activation_checkpointing
    if kind == "none":
        return
    found = layers(model)
    wrap = {"selective": partial(_selective, keeps=memory.selective_save), "offload": _offloaded}.get(kind, _full)
    for index in recomputed(memory, len(found)):
        found[index].forward = _in_training(found[index], wrap)


def recomputed(memory: Memory, num_layers: int) -> range:
    """The indices of the layers that keep less than all."""
    if memory.activation_checkpointing == "none":
        return range(0)
    return range(0, num_layers, memory.every_n_layers if memory.activation_checkpointing == "every_n_layers" else 1)


def repeated_share(memory: Memory, model: nn.Module, attention: str) -> tuple[float, float]:
    """(of the layers' matrix products with weights, of attention's) the part that is computed twice, 0 to 1.

    attention: what computes it. What else is repeated (norms, activation functions) is not counted in FLOPs.
    """
    if memory.activation_checkpointing == "none":
        return 0.0, 0.0
    num_layers = len(layers(model))
    share = len(recomputed(memory, num_layers)) / num_layers
    if memory.activation_checkpointing != "selective":
        return share, share
    products = 0.0 if memory.selective_save == "matmul" else share
    return products, share if attention == "eager" else 0.0


def _in_training(layer: nn.Module, wrap: Callable[[Forward], Forward]) -> Forward:
    """Evaluation keeps nothing anyway."""
    plain = layer.forward
    wrapped = wrap(plain)

    @wraps(plain)
    def forward(*args, **kwargs):
        chosen = wrapped if layer.training and torch.is_grad_enabled() else plain
        return chosen(*args, **kwargs)

    return forward


def _full(forward: Forward) -> Forward:
    # the reentrant kind needs an input with a gradient, which the first layer of a model with an adapter has not
    return partial(checkpoint, forward, use_reentrant=False)


def _selective(forward: Forward, keeps: str) -> Forward:
    return partial(checkpoint, forward, use_reentrant=False, context_fn=_contexts(keeps))


def _offloaded(forward: Forward) -> Forward:
    """Recomputed as with full, from inputs that wait in host memory."""

    def offloaded(*args, **kwargs):
        # pinned, or the copy back would wait for the host
        with torch.autograd.graph.save_on_cpu(pin_memory=args[0].is_cuda):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return offloaded


@cache
def _contexts(keeps: str) -> Callable:
    """The same object for all layers, or torch.compile would take each for something new."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, kept=_operators(keeps)))


def _operators(keeps: str) -> frozenset:
    names = _ATTENTION if keeps == "attention" else _ATTENTION + _PRODUCTS
    found = {getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)}
    return frozenset(found | {torch.ops.higher_order.flex_attention, *varlen.OPERATORS})


def _policy(context, operator, *args, kept: frozenset, **kwargs) -> CheckpointPolicy:
    """flash-attn's operators are not torch's, and there only when its package is."""
    keep = operator in kept or getattr(operator, "namespace", "") == "flash_attn"
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
