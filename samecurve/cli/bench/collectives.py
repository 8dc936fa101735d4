"""Measure time and bandwidth of collectives by message size, with Gloo or NCCL.

Without a launcher, the command starts the processes itself, on this machine. Under a launcher it measures the
launcher's processes, on any number of machines:

    torchrun ... -m samecurve bench collectives
    accelerate launch ... -m samecurve bench collectives
    deepspeed --no_local_rank --module ... samecurve bench collectives
"""

from __future__ import annotations

import argparse
import re

from samecurve.bench import printing
from samecurve.cli.commands import Subcommand, require_positive
from samecurve.errors import ConfigurationError

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num_processes", type=int, metavar="N", help="default: the number of GPUs, or 2 for gloo")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl if there are GPUs, else gloo")
    parser.add_argument("--collectives", metavar="a,b", help="for example all_reduce,all_to_all (default: all)")
    parser.add_argument("--smallest", default="1KiB", metavar="SIZE", help="smallest message (default: %(default)s)")
    parser.add_argument("--largest", default="64MiB", metavar="SIZE", help="largest message (default: %(default)s)")
    parser.add_argument(
        "--factor", type=int, default=4, metavar="N", help="factor from one size to the next (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="time to measure each number (default: %(default)s)")
    printing.add_json_option(parser)


def run(arguments: argparse.Namespace) -> Subcommand:
    require_positive(arguments, "num_processes", "seconds")
    smallest, largest = (parse_size(f"--{name}", getattr(arguments, name)) for name in ("smallest", "largest"))
    sizes = message_sizes(smallest, largest, arguments.factor)
    return Subcommand("samecurve.bench.collectives", (arguments, sizes))


def parse_size(option: str, text: str) -> int:
    """Parse a size such as 64MiB, 64M or 1024. Raises ConfigurationError."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in UNITS or int(match[1]) == 0:
        raise ConfigurationError(f"{option}: found {text}, but it must be a size such as 1KiB or 64MiB")
    return int(match[1]) * UNITS[match[2].upper()]


def message_sizes(smallest: int, largest: int, factor: int) -> list[int]:
    if factor < 2 or largest < smallest:
        raise ConfigurationError(
            f"--smallest {smallest} --largest {largest} --factor {factor}: no sizes to measure; --largest must be at "
            "least --smallest, and --factor at least 2"
        )
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes
