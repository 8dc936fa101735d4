"""Seconds of one call, and what they were measured on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import torch
from torch.utils.benchmark import Timer

from samecurve.distributed.cpu_workers import num_cores
from samecurve.specs.environment import processor, versions
from samecurve.storage.atomic import utc_timestamp

# tf32: fp32 numbers whose products are rounded to 10 bits of mantissa, on NVIDIA's matrix units
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_precisions(device: torch.device) -> list[str]:
    """A CPU has no tf32. What it emulates is measured too, so that a user sees it."""
    return [name for name in DTYPES if device.type == "cuda" or name != "tf32"]


def seconds_of(run: Callable[[], object], at_least: float) -> float:
    """The median of blocks of calls that together take `at_least` seconds; the device is waited for at their ends."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=at_least).median


def interleaved(runs: Mapping[str, Callable[[], object]], rounds: int, at_least: float) -> dict[str, float]:
    """Seconds of each, the median over rounds in which each has its turn, so that what disturbs one disturbs all."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(seconds_of(run, at_least))
    return {name: median(times) for name, times in found.items()}


@contextlib.contextmanager
def precision_of(name: str) -> Iterator[torch.dtype]:
    """The dtype of operands. Inside, fp32 is fp32 and tf32 is tf32, whatever PyTorch was told before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield DTYPES[name]
    finally:
        torch.set_float32_matmul_precision(before)


def operand(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers: a GPU that multiplies zeros or ones draws less power, and is faster than it is in training."""
    return torch.randn(*shape, device=device).to(dtype)


def environment(device: torch.device) -> dict[str, object]:
    """Hardware, versions and date, without which a measured number says little."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "date": utc_timestamp(),
    }


def told(facts: Mapping[str, object], names: Sequence[str] = ("torch",)) -> str:
    """One line of `environment`."""
    found = ", ".join(f"{name} {facts['versions'][name]}" for name in names)
    return f"{facts['device']}, cores {facts['cores']}, threads {facts['threads']}; {found}; {facts['date']}"
