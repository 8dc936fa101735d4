"""Linear layers whose frozen weights are stored in 4 or 8 bits under an adapter, as bitsandbytes or torchao round them.

- 4bit: NF4 with double quantization, half a byte per weight (QLoRA, Dettmers et al. 2023, arXiv:2305.14314)
- 8bit: int8 with a scale per row, as LLM.int8() stores weights (Dettmers et al. 2022, arXiv:2208.07339)
- torchao_int8: the same by torchao (Int8WeightOnlyConfig), whose scales are not rounded through fp16

All linear layers except the output head are quantized. Products are computed in the recipe's precision with weights
that are dequantized for the length of one product. LLM.int8() also rounds activations, except columns that are large in
some row of the micro-batch: results would depend on which rows are together, and therefore on the strategy.

The stored integers are a parameter, which FSDP2 and ZeRO-3 shard like any other. Mixed precision does not cast it, as
its dtype is no floating-point one. The scales, 1/31 of the bytes of 4-bit weights, are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from samecurve.errors import ConfigurationError
from samecurve.specs.precision import torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

BLOCK_SIZE = 64  # weights that share a scale, as in the paper


class QuantizedLinear(nn.Module):
    """A linear layer with a frozen weight of integers.

    Attributes:
        weight: 4bit: uint8, (out_features * in_features / 2, 1); others: int8, (out_features, in_features).
        scales: bitsandbytes' QuantState of 4 bits, fp32 (out_features, 1) of 8 bits; None before `write`.
    """

    scales: Any

    def __init__(self, linear: nn.Linear, kind: str, compute_dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind, self.compute_dtype, self.scales = kind, compute_dtype, None
        dtype = torch.uint8 if kind == "4bit" else torch.int8
        packed = torch.empty(stored_shape(linear.weight, kind), dtype=dtype, device="meta")
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = _Product.apply(inputs.to(self.compute_dtype), self.weight, self)
        assert isinstance(outputs, Tensor)  # typed as Any
        return (outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)).to(inputs.dtype)

    def quantize(self, full: Tensor) -> Tensor:
        """Return the integers of `full`, (out_features, in_features), and set their scales."""
        if self.kind == "torchao_int8":
            from torchao.quantization import Int8Tensor, PerRow

            stored = Int8Tensor.from_hp(full, PerRow())
            self.scales = stored.scale
            return stored.qdata
        from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

        if self.kind == "8bit":
            packed, largest, _ = int8_vectorwise_quant(full.half())  # as bitsandbytes' Int8Params
            self.scales = largest.unsqueeze(1).mul(1 / 127)
            return packed
        packed, self.scales = quantize_4bit(full, blocksize=BLOCK_SIZE, compress_statistics=True, quant_type="nf4")
        self.scales.dtype = self.compute_dtype
        return packed

    def dequantize(self, packed: Tensor) -> Tensor:
        """Return the weight, (out_features, in_features), in the compute dtype, from all of its integers."""
        if self.kind != "4bit":  # products of the two dtypes are rounded once
            return packed.to(self.compute_dtype).mul_(self.scales)
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(packed, self.scales)


class _Product(torch.autograd.Function):
    """inputs @ weight.T, which saves the integers alone for the backward pass.

    bitsandbytes' own saves a view, which would keep what ZeRO-3 has gathered; the parameter gets it anew.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(packed)
        return functional.linear(inputs, layer.dequantize(packed))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (packed,) = ctx.saved_tensors
        return gradients[0] @ ctx.layer.dequantize(packed), None, None


def quantize_layers(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """Replace the layers of a model on the meta device, in place, if the recipe quantizes; see `write`.

    Raises ConfigurationError for a model without such layers.
    """
    if kind := recipe.adapter.quantization:
        linears = _layers(model)
        if not linears:
            raise ConfigurationError(
                f"adapter.quantization: found {kind}, but {type(model).__name__} has no torch.nn.Linear to store so "
                "(GPT-2's layers are another class); leave it out"
            )
        for name, linear in linears:
            model.set_submodule(name, QuantizedLinear(linear, kind, torch_dtype(recipe.precision)))
    return model


def write(model: nn.Module, name: str, full: Tensor, device: torch.device) -> Tensor:
    """Return what a parameter of the live model stores of its full value: the integers of a quantized weight."""
    path, _, own = name.rpartition(".")
    layer = model.get_submodule(path)
    return layer.quantize(full.to(device)) if isinstance(layer, QuantizedLinear) and own == "weight" else full


def stored_shapes(model: PreTrainedModel, recipe: Recipe) -> dict[str, torch.Size]:
    """Return the shape in which each parameter of the skeleton `model` is stored, by name."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if kind := recipe.adapter.quantization:
        shapes |= {f"{name}.weight": stored_shape(linear.weight, kind) for name, linear in _layers(model)}
    return shapes


def stored_shape(weight: Tensor, kind: str) -> torch.Size:
    return torch.Size([(weight.numel() + 1) // 2, 1]) if kind == "4bit" else weight.shape


def scales(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors of all quantized layers' scales."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear) and layer.scales is not None:
            state = layer.scales
            yield from [state] if isinstance(state, Tensor) else [state.absmax, state.state2.absmax, state.offset]


def _layers(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    output = model.get_output_embeddings()
    # an adapter's own matrices are nn.Linear as well, but trained
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not module.weight.requires_grad and module is not output
    ]
