"""Benchmark of the memory that a process holds beside its tensors, measured in processes of its own."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from samecurve.bench import jobs, printing, timing
from samecurve.errors import ConfigurationError, SamecurveError
from samecurve.storage.records import read_record

PROBE = "samecurve.bench.memory_probe"
LIBRARIES = ("torch", "deepspeed")  # as the planner's Job.library
LOG_LINES = 10  # of a probe that fails

Parts = Mapping[str, float]
"""GiB that each step of a process's start adds, in order."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command `bench memory`."""
    if "RANK" in os.environ:
        raise ConfigurationError("bench memory: starts its processes itself, on one machine; leave out the launcher")
    num_gpus = torch.cuda.device_count()
    processes = jobs.count_processes(arguments.num_processes, num_gpus)
    # DeepSpeed adds nothing on a GPU but tensors
    libraries = LIBRARIES[:1] if num_gpus or not find_spec("deepspeed") else LIBRARIES
    parts = {library: measure(library, processes) for library in libraries}
    # not earlier: what this process has on a GPU would have counted
    facts = timing.describe_environment(timing.default_device())
    printing.print_line(timing.environment_line(facts, ("torch", "transformers", "accelerate", "deepspeed")))
    report(parts, processes, num_gpus)
    printing.write_json_file(arguments.json, "memory", facts, processes=processes, parts_gib=parts)
    return 0


def measure(library: str, processes: int) -> Parts:
    """Start the processes and return the parts of the one that holds the most.

    Raises:
        ConfigurationError: a GPU is not idle.
        SamecurveError: a process failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        start = [sys.executable, *jobs.RANKS, str(processes), "-m", PROBE, library, folder]
        with log.open("w", encoding="utf-8") as stream, jobs.processes(start, stream, processes) as process:
            code = process.wait()
        records = [read_record(path).value for path in sorted(Path(folder).glob("*.json"))]
        results = [record for record in records if record]
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
    problems = [result["problem"] for result in results if "problem" in result]
    if problems:
        raise ConfigurationError(problems[0])
    if code or len(results) != processes:
        raise SamecurveError(f"bench memory: a process with {library} failed with exit code {code}:\n{tail}")
    return max((result["parts_gib"] for result in results), key=lambda parts_gib: sum(parts_gib.values()))


def report(parts: Mapping[str, Parts], processes: int, num_gpus: int) -> None:
    """Print a column for each library."""
    names = list(dict.fromkeys(name for own in parts.values() for name in own))
    rows = [[name, *(f"{own[name]:.3f}" if name in own else "" for own in parts.values())] for name in names]
    rows.append(["together", *(f"{sum(own.values()):.3f}" for own in parts.values())])
    columns = ["after", *(["GPU"] if num_gpus else parts)]
    kind = "memory of a GPU" if num_gpus else "resident memory of a process"
    plural = "es" if processes > 1 else ""
    printing.print_table(columns, rows, f"GiB that each step adds to the {kind}, {processes} process{plural}")
    if num_gpus:
        printing.print_line(
            "without torch's allocator, which also has cuBLAS's workspaces; the GPU must be idle otherwise"
        )
    if num_gpus and processes == 1:
        printing.print_line("communicators: not measured, because they take two GPUs")
