"""Measure what a process holds beside its tensors: libraries, a GPU's context, and communicators.

On a GPU, which has to be idle otherwise, that is the memory of the CUDA context with torch's kernels and of NCCL; on a
CPU the resident memory of a process with each library. `plan --calibrate FILE` reads the result of --json FILE.
"""

from __future__ import annotations

import argparse

from samecurve.bench import printing
from samecurve.cli.commands import Subcommand, require_positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num_processes", type=int, metavar="N", help="default: the number of GPUs, or 2 on a CPU")
    printing.add_json_option(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    require_positive(arguments, "num_processes")
    return Subcommand("samecurve.bench.memory", (arguments,))
