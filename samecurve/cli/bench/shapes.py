"""The best width near a wanted one: the inner width of a SwiGLU layer, or a vocabulary and what pads it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from samecurve.bench import printing
from samecurve.errors import ConfigurationError

PRECISIONS = "fp32", "tf32", "bf16", "fp16"  # timing.DTYPES, which torch is needed for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden_size", type=int, required=True)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--width", type=int, help="of the inner layer; default: 8/3 of the hidden size, as in SwiGLU")
    wanted.add_argument("--vocabulary_size", type=int, help="instead: a vocabulary, which can only be padded")
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default: %(default)s")
    parser.add_argument("--multiples", metavar="a,b", help="default: 64,128,256")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each width (default: %(default)s)")
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    for option in ("hidden_size", "width", "vocabulary_size", "tokens"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{option}: found {value}, a number above 0 is needed")
    multiples = printing.integers("--multiples", arguments.multiples)

    from samecurve.bench import gemm_shapes, timing

    hidden_size, padded = arguments.hidden_size, arguments.vocabulary_size is not None
    wanted = arguments.vocabulary_size or arguments.width or gemm_shapes.swiglu_width(hidden_size)
    widths = gemm_shapes.candidates(wanted, [each for each in multiples if each] or gemm_shapes.MULTIPLES, padded)
    device = timing.default_device()
    facts = timing.environment(device)
    printing.say(timing.told(facts))
    measured = gemm_shapes.measure(
        hidden_size, widths, arguments.tokens, arguments.precision, device, arguments.seconds
    )
    best = gemm_shapes.recommended(measured, wanted, padded)
    rows = [[_named(each.width, wanted), f"{1e3 * each.seconds:.4g}", f"{each.tflops:.3g}"] for each in measured]
    title = f"{hidden_size} x width, {arguments.tokens:,} tokens, {arguments.precision}: forward and both gradients"
    printing.show(["width", "ms", "TFLOP/s"], rows, title)
    printing.say(f"recommended: {best.width}" + (f", {best.width - wanted:+d}" if best.width != wanted else ""))
    numbers = {"widths": [asdict(each) for each in measured], "wanted": wanted, "recommended": best.width}
    printing.write(arguments.json, "shapes", facts, hidden_size=hidden_size, tokens=arguments.tokens, **numbers)
    return 0


def _named(width: int, wanted: int) -> str:
    if width == wanted:
        return f"{width} (wanted)"
    factor = next((each for each in (256, 128, 64) if width % each == 0), None)
    return f"{width} = {width // factor} x {factor}" if factor else str(width)
