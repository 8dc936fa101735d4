"""Time and bandwidth of what processes send each other, over message sizes, by gloo or NCCL.

Started plainly it starts processes on this machine; `torchrun ... -m samecurve bench collectives` measures those of
torchrun, on as many machines as there are. So do `accelerate launch ... -m` and `deepspeed --no_local_rank --module`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from samecurve.bench import jobs, printing
from samecurve.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, help="how many to start; default: the number of GPUs, 2 for gloo")
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl on GPUs, gloo without")
    parser.add_argument("--collectives", metavar="a,b", help="such as all_reduce,all_to_all; default: all")
    parser.add_argument("--smallest", default="1KiB", help="message (default: %(default)s)")
    parser.add_argument("--largest", default="64MiB", help="message (default: %(default)s)")
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each number (default: %(default)s)")
    printing.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    smallest, largest = (bytes_of(f"--{name}", getattr(arguments, name)) for name in ("smallest", "largest"))
    sizes = steps(smallest, largest, arguments.factor)
    backend = _backend(arguments.backend)

    from samecurve.bench.collectives import COLLECTIVES

    names = printing.chosen("--collectives", arguments.collectives, COLLECTIVES, COLLECTIVES)
    if "RANK" not in os.environ:
        return _start(arguments, backend)
    return _measure(arguments, backend, names, sizes)


def bytes_of(option: str, text: str) -> int:
    """64MiB, 64M, 1024. Raises ConfigurationError."""
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


def _backend(asked: str | None) -> str:
    import torch

    if asked == "nccl" and not torch.cuda.is_available():
        raise ConfigurationError("--backend: found nccl, which needs GPUs, and PyTorch finds none; use gloo")
    return asked or ("nccl" if torch.cuda.is_available() else "gloo")


def _start(arguments: argparse.Namespace, backend: str) -> int:
    """The same command under torchrun. The exit code."""
    import torch

    num_gpus = torch.cuda.device_count()
    processes = arguments.processes or (num_gpus if backend == "nccl" else 2)
    if processes < 2 or (backend == "nccl" and processes > num_gpus):
        each = f", and NCCL needs a GPU for each, of which there are {num_gpus}; try --backend gloo --processes 2"
        raise ConfigurationError(
            f"--processes: found {processes}; at least 2 are needed to send anything{each * (backend == 'nccl')}"
        )
    start = [sys.executable, *jobs.TORCHRUN, "--nproc_per_node", str(processes), "-m", "samecurve"]
    options = [f"--{name}={value}" for name, value in vars(arguments).items() if value is not None]
    with jobs.processes([*start, "bench", "collectives", *options], None, processes) as process:
        return process.wait()


def _measure(arguments: argparse.Namespace, backend: str, names: Sequence[str], sizes: Sequence[int]) -> int:
    import torch
    from torch import distributed as dist

    from samecurve.bench import collectives, timing

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        machines = _machines(device)
        found = list(collectives.measure(names, sizes, device, arguments.seconds))
        if dist.get_rank() == 0:
            _tell(arguments, found, backend, machines, timing.environment(device))
    finally:
        dist.destroy_process_group()
    return 0


def _machines(device: torch.device) -> int:
    """Each has one first process; not every launcher says how many processes a machine has."""
    import torch
    from torch import distributed as dist

    first = torch.tensor(int(os.environ["LOCAL_RANK"] == "0"), device=device)
    dist.all_reduce(first)
    return int(first)


def _tell(arguments: argparse.Namespace, found: Sequence, backend: str, machines: int, facts: dict) -> None:
    from samecurve.bench import timing
    from samecurve.bench.collectives import Timing

    printing.say(timing.told(facts))
    timings = [each for each in found if isinstance(each, Timing)]
    lacking = dict(each for each in found if not isinstance(each, Timing))
    rows = [
        [
            each.name,
            shown_bytes(each.num_bytes),
            f"{1e6 * each.seconds:,.1f}",
            f"{each.algorithm_gb_per_second:.3g}",
            f"{each.bus_gb_per_second:.3g}",
        ]
        for each in timings
    ]
    processes = int(os.environ["WORLD_SIZE"])
    title = f"{backend}, {processes} processes on {machines} machine{'s' * (machines > 1)}, fp32"
    printing.show(["collective", "size", "microseconds", "algorithm GB/s", "bus GB/s"], rows, title)
    for name, why in lacking.items():
        printing.say(f"{name}: not offered by {backend} ({why})")
    printing.say(
        "algorithm: size / time. bus: that times 2 (n - 1) / n for all_reduce, (n - 1) / n for gather, all_gather, "
        "scatter, reduce_scatter and all_to_all, 1 for the others, as nccl-tests has it"
    )
    numbers = {"backend": backend, "processes": processes, "machines": machines, "not_offered": lacking}
    printing.write(arguments.json, "collectives", facts, **numbers, timings=[asdict(each) for each in timings])


def shown_bytes(number: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number} B"
