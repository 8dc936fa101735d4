"""Timing of calls, and the environment in which they were measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypedDict, TypeVar

import torch
from torch.utils.benchmark import Timer

from samecurve.distributed.affinity import num_cores
from samecurve.specs.environment import processor, versions
from samecurve.specs.precision import MATMUL_PRECISIONS, torch_dtype
from samecurve.storage.atomic import utc_timestamp

Name = TypeVar("Name")


class Environment(TypedDict):
    """Hardware, versions and date of a measurement."""

    device: str
    device_type: str
    cores: int
    threads: int
    versions: dict[str, str | None]
    date: str


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_precisions(device: torch.device) -> list[str]:
    """List the precisions to measure: all, but no tf32 on a CPU. Emulated ones are included, so that users see them."""
    return [name for name in MATMUL_PRECISIONS if device.type == "cuda" or name != "tf32"]


def seconds_of(run: Callable[[], object], at_least: float) -> float:
    """Measure the median seconds of one call over blocks of calls that together take `at_least` seconds.

    The device is synchronized at the end of each block.
    """
    # Timer's own default is a single thread
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=at_least).median


def interleaved(runs: Mapping[Name, Callable[[], object]], rounds: int, at_least: float) -> dict[Name, float]:
    """Measure several calls in turn in each round, so that disturbances affect all of them alike.

    Returns:
        The median seconds of one call over the rounds, by name.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run, at_least))
    return {name: median(times) for name, times in seconds.items()}


@contextlib.contextmanager
def precision_of(name: str) -> Iterator[torch.dtype]:
    """Yield the operands' dtype, with PyTorch's float32 matmul precision set in the body to that of fp32 or tf32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield torch_dtype("fp32" if name == "tf32" else name)
    finally:
        torch.set_float32_matmul_precision(before)


def describe_environment(device: torch.device) -> Environment:
    """Describe hardware, versions and date, without which measured numbers mean little."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "device_type": device.type,
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "date": utc_timestamp(),
    }


def environment_line(facts: Environment, packages: Sequence[str] = ("torch",)) -> str:
    """Format the environment as one line, with the versions of `packages`."""
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in packages)
    return f"{facts['device']}, cores {facts['cores']}, threads {facts['threads']}; {versions}; {facts['date']}"
