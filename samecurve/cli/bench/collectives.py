"""Measure time and bandwidth of collectives by message size, with gloo or NCCL.

Without a launcher, the command starts processes on this machine. `torchrun ... -m samecurve bench collectives` measures
torchrun's processes, on any number of machines. `accelerate launch ... -m` works too, as does
`deepspeed --no_local_rank --module`.
"""

from __future__ import annotations

import argparse
import re

from samecurve.bench import printing
from samecurve.cli.commands import Work
from samecurve.errors import ConfigurationError

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, help="number of processes; default: the number of GPUs, or 2 for gloo")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl with GPUs, gloo without")
    parser.add_argument("--collectives", metavar="a,b", help="for example all_reduce,all_to_all; default: all")
    parser.add_argument("--smallest", default="1KiB", help="smallest message (default: %(default)s)")
    parser.add_argument("--largest", default="64MiB", help="largest message (default: %(default)s)")
    parser.add_argument(
        "--factor", type=int, default=4, help="ratio of one size to the one before (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="measuring time of each number (default: %(default)s)"
    )
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> Work:
    smallest, largest = (bytes_of(f"--{name}", getattr(arguments, name)) for name in ("smallest", "largest"))
    sizes = steps(smallest, largest, arguments.factor)
    return Work("samecurve.bench.collectives", (arguments, sizes))


def bytes_of(option: str, text: str) -> int:
    """Parse a size such as 64MiB, 64M or 1024. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if not found or found[2].upper() not in UNITS or int(found[1]) == 0:
        raise ConfigurationError(f"{option}: found {text}, a size such as 1KiB or 64MiB is needed")
    return int(found[1]) * UNITS[found[2].upper()]


def steps(smallest: int, largest: int, factor: int) -> list[int]:
    if factor < 2 or largest < smallest:
        raise ConfigurationError(
            f"--smallest {smallest} --largest {largest} --factor {factor}: no sizes; the largest has to be at least "
            "the smallest, the factor at least 2"
        )
    found = [smallest]
    while found[-1] * factor <= largest:
        found.append(found[-1] * factor)
    return found
