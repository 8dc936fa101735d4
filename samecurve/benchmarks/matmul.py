"""The ceiling of a device: matrix multiplications of squares and of a model's layers, and copies of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .timing import interleaved, operand, precision_of, seconds_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUNDS = 3


@dataclass(frozen=True)
class Layer:
    """Weight matrices of one shape. names: their modules', count: how many there are in the model."""

    names: tuple[str, ...]
    count: int
    num_inputs: int
    num_outputs: int


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one matrix multiplication for each of the three that train a layer, and their rate."""

    layer: Layer
    forward: float
    input_gradient: float
    weight_gradient: float
    tflops: float

    @property
    def seconds(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient


def square(size: int, precision: str, device: torch.device, at_least: float) -> float:
    """TFLOP/s of (size, size) @ (size, size), laid out as a linear layer's; a multiplication is 2 size^3 FLOPs."""
    with precision_of(precision) as dtype:
        inputs, weight = (operand(size, size, dtype=dtype, device=device) for _ in range(2))
        return 2 * size**3 / seconds_of(lambda: inputs @ weight.T, at_least) / 1e12


def linear(
    num_tokens: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], torch.Tensor]]:
    """The multiplications that train (num_tokens, num_inputs) @ weight.T, each 2 tokens x inputs x outputs FLOPs."""
    inputs = operand(num_tokens, num_inputs, dtype=dtype, device=device)
    weight = operand(num_outputs, num_inputs, dtype=dtype, device=device)
    gradient = operand(num_tokens, num_outputs, dtype=dtype, device=device)
    return {
        "forward": lambda: inputs @ weight.T,
        "input_gradient": lambda: gradient @ weight,
        "weight_gradient": lambda: gradient.T @ inputs,
    }


def layer_time(layer: Layer, num_tokens: int, precision: str, device: torch.device, at_least: float) -> LayerTime:
    with precision_of(precision) as dtype:
        runs = linear(num_tokens, layer.num_inputs, layer.num_outputs, dtype, device)
        seconds = interleaved(runs, ROUNDS, at_least / ROUNDS)
    flops = 6 * num_tokens * layer.num_inputs * layer.num_outputs
    return LayerTime(layer, **seconds, tflops=flops / sum(seconds.values()) / 1e12)


def tokens_per_second(times: list[LayerTime], num_tokens: int) -> float:
    """What a device that did nothing but these multiplications would train, each as often as the model has it."""
    return num_tokens / sum(time.layer.count * time.seconds for time in times)


def layers(model: PreTrainedModel) -> list[Layer]:
    """Of every linear layer, the head among them, by shape. The model may be on the meta device."""
    found: dict[tuple[int, int], list[str]] = {}
    for name, shape in _linear_shapes(model):
        found.setdefault(shape, []).append(name.rpartition(".")[2])
    return [Layer(tuple(dict.fromkeys(names)), len(names), *shape) for shape, names in found.items()]


def _linear_shapes(model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, int]]]:
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name, (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):  # GPT-2's linear layer, whose weight is the other way round
            yield name, tuple(module.weight.shape)


def copies(num_bytes: int, device: torch.device, at_least: float) -> dict[str, float]:
    """GB/s by where the bytes go. On the device each byte is read and written, and both count; over the bus once."""
    one, other = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    found = {"on the device": 2 * num_bytes / seconds_of(lambda: one.copy_(other), at_least) / 1e9}
    if device.type == "cuda":
        host = torch.ones(num_bytes, dtype=torch.uint8).pin_memory()
        to_device = seconds_of(lambda: one.copy_(host, non_blocking=True), at_least)
        to_host = seconds_of(lambda: host.copy_(one, non_blocking=True), at_least)
        found |= {"host to device": num_bytes / to_device / 1e9, "device to host": num_bytes / to_host / 1e9}
    return found
