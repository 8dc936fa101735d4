"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): 4-bit base weights under an adapter, through bitsandbytes.

All linear layers except the output head are stored as NF4 with double quantization, half a byte per weight, and
multiplied in the recipe's precision. Embeddings, norms and the adapter stay fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from samecurve.models.skeleton import construct
from samecurve.specs.precision import torch_dtype

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

BLOCK_SIZE = 64  # weights that share a scale, as in the paper


def build(skeleton: PreTrainedModel, recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """Build the model as skeleton.construct, with uninitialized 4-bit layers (see `write`).

    The layers to quantize are never allocated unquantized.
    """
    model = construct(type(skeleton), skeleton.config, torch.device("meta"), recipe.adapter)
    output = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # an adapter's own matrices are nn.Linear as well, but trained
            if type(child) is nn.Linear and not child.weight.requires_grad and child is not output:
                setattr(parent, name, _quantized_layer(child, device, torch_dtype(recipe.precision)))
    for module in model.modules():
        if not is_quantized(getattr(module, "weight", None)):
            module.to_empty(device=device, recurse=False)
    model.tie_weights()  # to_empty gave each of two tied modules its own parameter
    return model


def is_quantized(parameter: object) -> TypeGuard[Params4bit]:
    return hasattr(parameter, "quant_type")


def write(parameter: Params4bit, full: Tensor) -> None:
    """Quantize `full`, (out_features, in_features), into a 4-bit parameter of a model from `build`."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        full.to(parameter.device), blocksize=BLOCK_SIZE, compress_statistics=True, quant_type="nf4"
    )
    parameter.data.copy_(packed)
    assert parameter.module is not None  # as `_quantized_layer` sets it
    # bitsandbytes takes the module's state for a parameter that lost its own when it was converted
    parameter.quant_state = parameter.module.quant_state = state


def _quantized_layer(linear: nn.Linear, device: torch.device, compute_dtype: torch.dtype) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute_dtype,
        quant_type="nf4",
        device=torch.device("meta"),
    )
    packed = torch.empty((linear.weight.numel() + 1) // 2, 1, dtype=torch.uint8, device=device)
    # pyright reads torch's stub of nn.Parameter in place of Params4bit.__new__
    layer.weight = Params4bit(
        packed,
        requires_grad=False,
        blocksize=BLOCK_SIZE,  # pyright: ignore[reportCallIssue]
        quant_type="nf4",  # pyright: ignore[reportCallIssue]
        bnb_quantized=True,  # pyright: ignore[reportCallIssue]  # or .to() would quantize the packed bytes
        module=layer,  # pyright: ignore[reportCallIssue]
    )
    if linear.bias is not None:
        layer.bias = nn.Parameter(torch.empty(linear.out_features, device=device), requires_grad=False)
    return layer
