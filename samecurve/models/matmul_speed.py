"""How fast this device multiplies matrices in each precision: the peak behind mfu, and which precision trains fastest.

A CPU without instructions for bf16 or fp16 emulates them, and PyTorch falls back to plain loops where oneDNN does not
help. Torch 2.13 with AVX2 alone, 2 cores, 1024 tokens, 768 -> 3072, in GFLOP/s: forward 15 in bf16 and 179 in fp32, the
gradient of the inputs 0.5 and 175. One layout alone would not show it, so all three of a training step are measured.
Both measurements together take 0.4 to 1 second of a start (2 busy cores, with and without AVX-512).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

T = TypeVar("T")
ROUNDS = 3
PEAK_SECONDS = 0.15
TRAINING_SECONDS = 0.1
SMALLEST, LARGEST_SQUARE = 128, 8192
FAR_BELOW = 4  # what is that many times slower than the best is not tried with larger matrices
PRODUCTS = ("forward", "input_gradient", "weight_gradient")
SLOWDOWN_WORTH_TELLING = 1.5


@dataclass(frozen=True)
class Shape:
    """A linear layer and how many tokens go through it at a time."""

    num_tokens: int
    num_inputs: int
    num_outputs: int

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens, {self.num_inputs:,} -> {self.num_outputs:,}"

    @property
    def flops(self) -> int:
        """Of one of the three matrix multiplications that train it."""
        return 2 * self.num_tokens * self.num_inputs * self.num_outputs

    def capped(self, limit: int) -> Shape:
        return Shape(*(min(limit, size) for size in (self.num_tokens, self.num_inputs, self.num_outputs)))


def products(
    inputs: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """The three matrix multiplications that train a linear layer, in the layouts of autograd.

    inputs: (tokens, inputs), weight: (outputs, inputs), gradient: (tokens, outputs).
    """
    runs = (lambda: inputs @ weight.T, lambda: gradient @ weight, lambda: gradient.T @ inputs)
    return dict(zip(PRODUCTS, runs, strict=True))


def training_seconds(
    device: torch.device, precisions: Sequence[str], shape: Shape, seconds: float = TRAINING_SECONDS
) -> tuple[Shape, dict[str, float]]:
    """How long the three products of `shape` take together, by precision.

    Measured on as large a part of the shape as fits into about `seconds`; returns that part, and its numbers.
    """

    def rate(measured: tuple[Shape, dict[str, float]]) -> float:
        part, found = measured
        return part.flops / min(found.values())

    return max(_by_threads(lambda: _training_seconds(device, precisions, shape, seconds), device), key=rate)


def _training_seconds(
    device: torch.device, precisions: Sequence[str], shape: Shape, seconds: float
) -> tuple[Shape, dict[str, float]]:
    end, limit = time.perf_counter() + seconds, SMALLEST
    _warm_up(device, precisions)
    while True:
        part = shape.capped(limit)
        runs = {(precision, name): run for precision in precisions for name, run in _runs(device, precision, part)}
        times = _fastest(runs, device)
        if part == shape or time.perf_counter() + 8 * ROUNDS * sum(times.values()) > end:
            return part, {each: sum(times[each, name] for name in PRODUCTS) for each in precisions}
        limit *= 2


def peak(device: torch.device, precisions: Sequence[str], seconds: float = PEAK_SECONDS) -> tuple[float, str]:
    """(TFLOP/s, precision) of the fastest product of square matrices, which grow as far as about `seconds` allow.

    Of all precisions and all three layouts, so that a training step is made of nothing faster.
    """
    return max(_by_threads(lambda: _peak(device, precisions, seconds), device))


def _peak(device: torch.device, precisions: Sequence[str], seconds: float) -> tuple[float, str]:
    end, size, best = time.perf_counter() + seconds, SMALLEST, (0.0, "")
    _warm_up(device, precisions)
    tried = {(precision, name) for precision in precisions for name in PRODUCTS}
    while True:
        square = Shape(size, size, size)
        runs = {(each, name): run for each in precisions for name, run in _runs(device, each, square)}
        times = _fastest({key: run for key, run in runs.items() if key in tried}, device)
        (precision, _), least = min(times.items(), key=lambda item: item[1])
        best = max(best, (square.flops / least / 1e12, precision))
        tried = {key for key, took in times.items() if took < FAR_BELOW * least}
        again = ROUNDS * sum(times[key] for key in tried)
        if time.perf_counter() + again > end:
            return best
        if size < LARGEST_SQUARE and time.perf_counter() + 8 * again <= end:
            size *= 2


def _by_threads(measure: Callable[[], T], device: torch.device) -> list[T]:
    """With all threads of this process, and with one: where others keep the cores busy, threads wait for each other at
    the end of every product, and one alone is faster (2 threads on 2 busy cores: 2 GFLOP/s, one 120)."""
    import torch

    found, threads = [measure()], torch.get_num_threads()
    if device.type == "cpu" and threads > 1:
        torch.set_num_threads(1)
        try:
            found.append(measure())
        finally:
            torch.set_num_threads(threads)
    return found


def _fastest(
    runs: Mapping[tuple[str, str], Callable[[], object]], device: torch.device
) -> dict[tuple[str, str], float]:
    """Seconds of each: its fastest of ROUNDS, in which each has its turn, so that what disturbs one disturbs all."""
    rounds = [{key: _timed(run, device) for key, run in runs.items()} for _ in range(ROUNDS)]
    return {key: min(times[key] for times in rounds) for key in runs}


def warning(recipe: Recipe, model: PreTrainedModel, device: torch.device) -> str:
    """One line where another precision trains faster here than the recipe's, with its key; "" elsewhere.

    Measures only where bf16 or fp16 may be emulated: on a CPU, and in bf16 on an NVIDIA GPU older than Ampere.
    The model may be on the meta device.
    """
    others = _alternatives(recipe.precision, device)
    if not others:
        return ""
    batch = recipe.batch
    shape = Shape(batch.micro_batch_size * batch.sequence_length, *_largest_layer(model))
    shape, seconds = training_seconds(device, [*others, recipe.precision], shape)
    faster = min(others, key=seconds.__getitem__)
    ratio = seconds[recipe.precision] / seconds[faster]
    if ratio < SLOWDOWN_WORTH_TELLING:
        return ""
    rates = [f"{3 * shape.flops / seconds[each] / 1e9:,.3g} GFLOP/s in {each}" for each in (recipe.precision, faster)]
    return (
        f"{recipe.precision} is slow on this {'CPU' if device.type == 'cpu' else 'GPU'}: {faster} multiplies matrices "
        f"{ratio:,.{0 if ratio >= 10 else 1}f} times faster ({rates[0]}, {rates[1]}; measured forward and backward, "
        f"{shape}). {_fix(recipe, faster)}"
    )


def _alternatives(precision: str, device: torch.device) -> list[str]:
    """fp16 needs loss scaling, so a CPU that is asked for bf16 is not compared with it."""
    import torch

    if device.type == "cpu":
        return {"bf16": ["fp32"], "fp16": ["fp32", "bf16"]}.get(precision, [])
    emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return ["fp32", "fp16"] if emulated and precision == "bf16" else []


def _fix(recipe: Recipe, precision: str) -> str:
    """What else bf16 alone allows has to change with it (rules_optimizer.py, rules_memory.py)."""
    keys = {"precision": precision}
    if precision != "bf16" and recipe.optimizer.name == "adamw_bf16":
        keys["optimizer.name"] = "adamw"
    if precision != "bf16" and recipe.fp8 != "off":
        keys["fp8"] = "off"
    in_recipe = " and ".join(f"`{key}: {value}`" for key, value in keys.items())
    in_command = " ".join(f"{key}={value}" for key, value in keys.items())
    return f"Set {in_recipe} in the recipe, or add {in_command} to the command"


def _largest_layer(model: PreTrainedModel) -> tuple[int, int]:
    """(inputs, outputs) of the largest weight matrix that is no embedding."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    looked_up = [getattr(each, "weight", each) for each in ends if each is not None]  # perceiver's is a bare parameter
    left_out = set(map(id, looked_up))
    shapes = [tuple(each.shape) for each in model.parameters() if each.ndim == 2 and id(each) not in left_out]
    outputs, inputs = max(shapes, key=math.prod, default=(SMALLEST, SMALLEST))
    return inputs, outputs


def _runs(device: torch.device, precision: str, shape: Shape) -> Iterable[tuple[str, Callable[[], torch.Tensor]]]:
    """The products by name, of ones: random numbers would move the generator that dropout draws from, on this rank."""
    import torch

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(size, dtype=_dtype(precision), device=device)

    tokens, inputs, outputs = shape.num_tokens, shape.num_inputs, shape.num_outputs
    return products(ones(tokens, inputs), ones(outputs, inputs), ones(tokens, outputs)).items()


def _dtype(precision: str) -> torch.dtype:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def _warm_up(device: torch.device, precisions: Sequence[str]) -> None:
    """Start-up costs of threads and libraries."""
    for precision in precisions:
        for _, run in _runs(device, precision, Shape(16, 16, 16)):
            _timed(run, device)


def _timed(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds of one call, finished on the device."""
    import torch

    def finish() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    finish()
    start = time.perf_counter()
    run()
    finish()
    return time.perf_counter() - start
