"""Benchmark of matrix shapes: the layer width near a given one at which a device multiplies best."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from samecurve.bench import printing, timing
from samecurve.bench.matmul import linear
from samecurve.bench.timing import interleaved, precision_of

MULTIPLES = (64, 128, 256)
ROUNDS = 5
# Relative difference below which rates count as equal: the machine may be doing other work too.
TIE = 0.02


@dataclass(frozen=True)
class Width:
    """A candidate. seconds: of a layer's three multiplications (forward and both gradients). tflops: their rate."""

    width: int
    seconds: float
    tflops: float


def swiglu_width(hidden_size: int) -> int:
    """Return 8/3 of the hidden size: three such matrices equal two of 4 times in weights (arXiv:2002.05202)."""
    return round(8 * hidden_size / 3)


def candidates(wanted: int, multiples: Sequence[int] = MULTIPLES, only_larger: bool = False) -> list[int]:
    """List the wanted width and its next multiples below and above. only_larger: none below (vocabulary sizes)."""
    below = {wanted // multiple * multiple for multiple in multiples if not only_larger}
    above = {-(-wanted // multiple) * multiple for multiple in multiples}
    return sorted({wanted, *above, *(width for width in below if width > 0)})


def measure(
    hidden_size: int, widths: Sequence[int], num_tokens: int, precision: str, device: torch.device, at_least: float
) -> list[Width]:
    """Measure a linear layer between `hidden_size` and each width, with all widths in turn in each round.

    Args:
        hidden_size: number of inputs.
        widths: numbers of outputs.
        at_least: seconds to measure each width.
    """
    measured = []
    with precision_of(precision) as dtype:
        runs = {width: linear(num_tokens, hidden_size, width, dtype, device) for width in widths}
        calls = {(width, name): run for width, named in runs.items() for name, run in named.items()}
        seconds = interleaved(calls, ROUNDS, at_least / (3 * ROUNDS))  # each width has three calls
    for width in widths:
        layer_seconds = sum(seconds[width, name] for name in runs[width])
        measured.append(Width(width, layer_seconds, 6 * num_tokens * hidden_size * width / layer_seconds / 1e12))
    return measured


def recommended(measured: Sequence[Width], wanted: int, only_larger: bool = False) -> Width:
    """Choose the width with the best rate; among equal ones (TIE) the one nearest to the wanted.

    only_larger: choose the width that takes the least time, among equal ones the smallest. Padding of a vocabulary is
    wasted work, so a higher rate alone does not pay off.
    """
    if only_larger:
        least = min(layer.seconds for layer in measured)
        return min((layer for layer in measured if layer.seconds <= least * (1 + TIE)), key=lambda layer: layer.width)
    best = max(layer.tflops for layer in measured)
    near = [layer for layer in measured if layer.tflops >= best * (1 - TIE)]
    return min(near, key=lambda layer: (abs(layer.width - wanted), -layer.width))


def run(arguments: argparse.Namespace, multiples: Sequence[int]) -> int:
    """Run the command `bench shapes`. multiples: --multiples; empty for the default."""
    hidden_size, padded = arguments.hidden_size, arguments.vocabulary_size is not None
    wanted = arguments.vocabulary_size or arguments.width or swiglu_width(hidden_size)
    widths = candidates(wanted, multiples or MULTIPLES, padded)
    device = timing.default_device()
    facts = timing.describe_environment(device)
    printing.print_line(timing.environment_line(facts))
    measured = measure(hidden_size, widths, arguments.tokens, arguments.precision, device, arguments.seconds)
    best = recommended(measured, wanted, padded)
    rows = [
        [_width_text(layer.width, wanted), f"{1e3 * layer.seconds:.4g}", f"{layer.tflops:.3g}"] for layer in measured
    ]
    title = f"{hidden_size} x width, {arguments.tokens:,} tokens, {arguments.precision}: forward and both gradients"
    printing.print_table(["width", "ms", "TFLOP/s"], rows, title)
    printing.print_line(f"recommended: {best.width}" + (f", {best.width - wanted:+d}" if best.width != wanted else ""))
    numbers = {"widths": [asdict(layer) for layer in measured], "wanted": wanted, "recommended": best.width}
    printing.write_json_file(
        arguments.json, "shapes", facts, hidden_size=hidden_size, tokens=arguments.tokens, **numbers
    )
    return 0


def _width_text(width: int, wanted: int) -> str:
    if width == wanted:
        return f"{width} (wanted)"
    factor = next((power for power in (256, 128, 64) if width % power == 0), None)
    return f"{width} = {width // factor} x {factor}" if factor else str(width)
