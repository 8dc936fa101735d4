"""Benchmark of this device's matrix multiplication by precision: for mfu's peak, and to find the fastest precision.

A CPU without instructions for bf16 or fp16 emulates them, and PyTorch falls back to plain loops where oneDNN has no
kernel. Example in GFLOP/s (torch 2.13, AVX2 only, 2 cores, 1024 tokens, 768 -> 3072): forward 15 in bf16 and 179 in
fp32, gradient of the inputs 0.5 and 175. One layout alone would not show the difference, so all three layouts of a
training step are measured. Both measurements together take 0.4 to 1 second at startup (2 busy cores, with and without
AVX-512).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from samecurve.specs.precision import torch_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from samecurve.config.schema import Recipe

T = TypeVar("T")
ROUNDS = 3
PEAK_SECONDS = 0.15
TRAINING_SECONDS = 0.1
SMALLEST, LARGEST_SQUARE = 128, 8192
FAR_BELOW = 4  # products slower than the best by this factor are not tried with larger matrices
PRODUCTS = ("forward", "input_gradient", "weight_gradient")
SLOWDOWN_WORTH_TELLING = 1.5


@dataclass(frozen=True)
class Shape:
    """Size of a linear layer's matrix product: number of tokens, inputs and outputs."""

    num_tokens: int
    num_inputs: int
    num_outputs: int

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens, {self.num_inputs:,} -> {self.num_outputs:,}"

    @property
    def flops(self) -> int:
        """FLOPs of one of the three matrix multiplications of a training step."""
        return 2 * self.num_tokens * self.num_inputs * self.num_outputs

    def capped(self, limit: int) -> Shape:
        return Shape(*(min(limit, size) for size in (self.num_tokens, self.num_inputs, self.num_outputs)))


def training_seconds(
    device: torch.device, precisions: Sequence[str], shape: Shape, seconds: float = TRAINING_SECONDS
) -> tuple[Shape, dict[str, float]]:
    """Measure the duration of the three products of `shape` together, by precision.

    Args:
        precisions: the recipes' names for them, for example "bf16".
        shape: tokens, inputs and outputs of a linear layer.
        seconds: about how long to measure, all precisions together; on a CPU twice, see `_by_threads`.

    Returns:
        (part, seconds by precision): the largest part of `shape` that can be measured in about `seconds`.
    """

    def measure() -> tuple[Shape, dict[str, float]]:
        end, limit = time.perf_counter() + seconds, SMALLEST
        _warm_up(device, precisions)
        while True:
            part = shape.capped(limit)
            runs = _runs(device, precisions, part)
            times = _fastest(runs, device)
            # sides of twice the length mean eight times the work
            if part == shape or time.perf_counter() + 8 * ROUNDS * sum(times.values()) > end:
                return part, {precision: sum(times[precision, name] for name in PRODUCTS) for precision in precisions}
            limit *= 2

    def rate(measured: tuple[Shape, dict[str, float]]) -> float:
        part, seconds = measured
        return part.flops / min(seconds.values())

    return max(_by_threads(measure, device), key=rate)


def peak(device: torch.device, precisions: Sequence[str], seconds: float = PEAK_SECONDS) -> tuple[float, str]:
    """Measure the fastest product of square matrices, whose size grows for about `seconds`.

    All precisions and all three layouts are tried, so that no product of a training step is faster.

    Returns:
        (TFLOP/s, precision).
    """

    def measure() -> tuple[float, str]:
        end, size, best = time.perf_counter() + seconds, SMALLEST, (0.0, "")
        _warm_up(device, precisions)
        tried = {(precision, name) for precision in precisions for name in PRODUCTS}
        while True:
            square = Shape(size, size, size)
            runs = _runs(device, precisions, square)
            times = _fastest({key: run for key, run in runs.items() if key in tried}, device)
            (precision, _), least = min(times.items(), key=lambda item: item[1])
            best = max(best, (square.flops / least / 1e12, precision))
            tried = {key for key, took in times.items() if took < FAR_BELOW * least}
            again = ROUNDS * sum(times[key] for key in tried)
            if time.perf_counter() + again > end:
                return best
            # Sides of twice the length mean eight times the work. Where time is short, the same size is measured again,
            # because the fastest of more rounds is nearer to the peak.
            if size < LARGEST_SQUARE and time.perf_counter() + 8 * again <= end:
                size *= 2

    return max(_by_threads(measure, device))


def _by_threads(measure: Callable[[], T], device: torch.device) -> list[T]:
    """Measure with all threads of this process and, on a CPU, also with one.

    If other processes keep the cores busy, threads wait for each other at the end of every product, and a single thread
    is faster (on 2 busy cores: 2 GFLOP/s with 2 threads, 120 with one).
    """
    import torch

    results, threads = [measure()], torch.get_num_threads()
    if device.type == "cpu" and threads > 1:
        torch.set_num_threads(1)
        try:
            results.append(measure())
        finally:
            torch.set_num_threads(threads)
    return results


def _fastest(
    runs: Mapping[tuple[str, str], Callable[[], object]], device: torch.device
) -> dict[tuple[str, str], float]:
    """Measure each run's fastest of ROUNDS in seconds. Runs alternate, so that a disturbance affects all of them."""
    rounds = [{key: seconds_of_call(run, device) for key, run in runs.items()} for _ in range(ROUNDS)]
    return {key: min(times[key] for times in rounds) for key in runs}


def precision_warning(recipe: Recipe, model: PreTrainedModel, device: torch.device) -> str:
    """Return a one-line warning if another precision trains faster on this device than the recipe's, else "".

    Measures only where bf16 or fp16 may be emulated: on a CPU, and in bf16 on an NVIDIA GPU older than Ampere.
    The model may be on the meta device.
    """
    import torch

    others = []
    if device.type == "cpu":
        # not fp16 for bf16: it needs loss scaling
        others = {"bf16": ["fp32"], "fp16": ["fp32", "bf16"]}.get(recipe.precision, [])
    elif device.type == "cuda" and recipe.precision == "bf16":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        others = [] if has_bf16 else ["fp32", "fp16"]
    if not others:
        return ""
    batch = recipe.batch
    # of the largest weight matrix that is not an embedding
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    # perceiver's embedding is a bare parameter
    left_out = {id(getattr(module, "weight", module)) for module in ends if module is not None}
    shapes = [tuple(weight.shape) for weight in model.parameters() if weight.ndim == 2 and id(weight) not in left_out]
    outputs, inputs = max(shapes, key=math.prod, default=(SMALLEST, SMALLEST))
    shape = Shape(batch.micro_batch_size * batch.sequence_length, inputs, outputs)
    shape, seconds = training_seconds(device, [*others, recipe.precision], shape)
    faster = min(others, key=seconds.__getitem__)
    ratio = seconds[recipe.precision] / seconds[faster]
    if ratio < SLOWDOWN_WORTH_TELLING:
        return ""
    keys = {"precision": faster}
    # these require bf16 (config/rules_training.py)
    if faster != "bf16" and recipe.optimizer.name == "adamw_bf16":
        keys["optimizer.name"] = "adamw"
    if faster != "bf16" and recipe.fp8 != "off":
        keys["fp8"] = "off"
    in_recipe = " and ".join(f"`{key}: {value}`" for key, value in keys.items())
    in_command = " ".join(f"{key}={value}" for key, value in keys.items())
    rates = [
        f"{3 * shape.flops / seconds[precision] / 1e9:,.3g} GFLOP/s in {precision}"
        for precision in (recipe.precision, faster)
    ]
    return (
        f"{recipe.precision} is slow on this {'CPU' if device.type == 'cpu' else 'GPU'}: {faster} multiplies matrices "
        f"{ratio:,.{0 if ratio >= 10 else 1}f} times faster ({rates[0]}, {rates[1]}; measured forward and backward, "
        f"{shape}). Set {in_recipe} in the recipe, or add {in_command} to the command"
    )


def matmul_runs(device: torch.device, dtype: torch.dtype, shape: Shape) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the three matrix multiplications of a linear layer's training step, by name, in autograd's layouts.

    The matrices are random: with constants a GPU draws less power and is faster. They have a generator of their own;
    the default one would advance on this rank only.
    """
    import torch

    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    tokens, inputs, outputs = shape.num_tokens, shape.num_inputs, shape.num_outputs
    rows, weight, gradient = drawn(tokens, inputs), drawn(outputs, inputs), drawn(tokens, outputs)
    runs = (lambda: rows @ weight.T, lambda: gradient @ weight, lambda: gradient.T @ rows)
    return dict(zip(PRODUCTS, runs, strict=True))


def _runs(
    device: torch.device, precisions: Sequence[str], shape: Shape
) -> dict[tuple[str, str], Callable[[], torch.Tensor]]:
    """Return the runs of all precisions, by precision and product."""
    made = {precision: matmul_runs(device, torch_dtype(precision), shape) for precision in precisions}
    return {(precision, name): run for precision, runs in made.items() for name, run in runs.items()}


def _warm_up(device: torch.device, precisions: Sequence[str]) -> None:
    """Run each product once, to keep startup costs of threads and libraries out of the measurement."""
    for run in _runs(device, precisions, Shape(16, 16, 16)).values():
        seconds_of_call(run, device)


def seconds_of_call(run: Callable[[], object], device: torch.device) -> float:
    """Measure one call in seconds, including its completion on the device."""
    import torch

    def finish() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    finish()
    start = time.perf_counter()
    run()
    finish()
    return time.perf_counter() - start
