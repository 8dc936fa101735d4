"""Find the fastest size near a given one: the inner width of a SwiGLU layer, or a padded vocabulary size."""

from __future__ import annotations

import argparse

from samecurve.bench import printing
from samecurve.cli.commands import Subcommand, require_positive
from samecurve.specs.precision import MATMUL_PRECISIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden_size", type=int, required=True, metavar="N", help="hidden size of the model")
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--width", type=int, metavar="N", help="inner width (default: 8/3 of the hidden size, as in SwiGLU)"
    )
    wanted.add_argument(
        "--vocabulary_size", type=int, metavar="N", help="pad a vocabulary of this size; no smaller size is tried"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="tokens of a micro-batch (default: %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=MATMUL_PRECISIONS, default="bf16", help="precision of products (default: %(default)s)"
    )
    parser.add_argument(
        "--multiples", metavar="a,b", help="try the next multiples of these numbers (default: 64,128,256)"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time to measure each size (default: %(default)s)")
    printing.add_json_option(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    require_positive(arguments, "hidden_size", "width", "vocabulary_size", "tokens", "seconds")
    multiples = printing.parse_integers("--multiples", arguments.multiples, least=1)
    return Subcommand("samecurve.bench.gemm_shapes", (arguments, multiples))
