"""Find the fastest width near a wanted one: the inner width of a SwiGLU layer, or a padded vocabulary size."""

from __future__ import annotations

import argparse

from samecurve.bench import printing
from samecurve.cli.commands import Work
from samecurve.errors import ConfigurationError

PRECISIONS = "fp32", "tf32", "bf16", "fp16"  # the keys of timing.DTYPES, whose import would need torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden_size", type=int, required=True)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--width", type=int, help="width of the inner layer; default: 8/3 of the hidden size, as in SwiGLU"
    )
    wanted.add_argument(
        "--vocabulary_size", type=int, help="measure a vocabulary size instead, which can only be padded"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default: %(default)s")
    parser.add_argument("--multiples", metavar="a,b", help="default: 64,128,256")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="measuring time of each width (default: %(default)s)"
    )
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> Work:
    for option in ("hidden_size", "width", "vocabulary_size", "tokens"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{option}: found {value}, a number above 0 is needed")
    multiples = printing.integers("--multiples", arguments.multiples)
    return Work("samecurve.bench.gemm_shapes", (arguments, multiples))
