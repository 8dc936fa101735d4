"""Benchmark of collectives: time and bandwidth by message size.

Bandwidths are defined as in nccl-tests (doc/PERFORMANCE.md), so that numbers are comparable:

* Algorithm bandwidth is size / time.
* Bus bandwidth is algorithm bandwidth times a factor that removes the dependence on the number of processes n, so that
  it can be compared with the hardware's: 2 (n - 1) / n for all_reduce and ring_all_reduce; (n - 1) / n for all_gather,
  reduce_scatter, all_to_all, gather and scatter; 1 for broadcast, reduce and send_recv.

ring_all_reduce is written out over send and receive, to be compared with the library's all_reduce.

The size is that of the whole data: the output of all_gather and gather, the input of reduce_scatter and scatter, the
input of each process of all_to_all.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import distributed as dist

from samecurve.bench import jobs, printing, timing
from samecurve.bench.collective_calls import COLLECTIVES, Buffers, Collective, is_unsupported
from samecurve.distributed import network
from samecurve.errors import ConfigurationError

FEWEST, MOST = 3, 200  # calls per size


def run(arguments: argparse.Namespace, sizes: Sequence[int]) -> int:
    """Run the command `bench collectives` in a launcher's processes, or else in processes started here."""
    if arguments.backend == "nccl" and not torch.cuda.is_available():
        raise ConfigurationError("--backend: found nccl, but PyTorch finds no GPU; use gloo")
    backend = arguments.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    names = printing.parse_names("--collectives", arguments.collectives, COLLECTIVES, COLLECTIVES)
    if "RANK" in os.environ:
        return _measure(arguments, backend, names, sizes)
    num_gpus = torch.cuda.device_count()
    asked = arguments.num_processes
    processes = jobs.count_processes(asked) if backend == "gloo" else asked or num_gpus
    if processes < 2 or (backend == "nccl" and processes > num_gpus):
        gpus = f", with a GPU each for NCCL (found {num_gpus}); try --backend gloo --num_processes 2"
        raise ConfigurationError(
            f"--num_processes: found {processes}, but a collective needs at least 2{gpus * (backend == 'nccl')}"
        )
    start = [sys.executable, *jobs.RANKS, str(processes), "-m", "samecurve"]
    options = [f"--{name}={value}" for name, value in vars(arguments).items() if value is not None]
    with jobs.processes([*start, "bench", "collectives", *options], None, processes) as process:
        return process.wait()


def _measure(arguments: argparse.Namespace, backend: str, names: Sequence[str], sizes: Sequence[int]) -> int:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # gloo would listen on what the host's own name resolves to, often 127.0.1.1
    network.choose_interface()
    dist.init_process_group(backend, init_method=network.rendezvous())
    try:
        # counted by the processes with LOCAL_RANK 0: not every launcher reports the processes per machine
        machines = torch.tensor(int(os.environ["LOCAL_RANK"] == "0"), device=device)
        dist.all_reduce(machines)
        results = list(measure(names, sizes, device, arguments.seconds))
        if dist.get_rank() == 0:
            _report(arguments, results, backend, int(machines), timing.describe_environment(device))
    finally:
        dist.destroy_process_group()
    return 0


def _report(
    arguments: argparse.Namespace,
    results: Sequence,
    backend: str,
    machines: int,
    facts: timing.Environment,
) -> None:
    printing.print_line(timing.environment_line(facts))
    timings = [result for result in results if isinstance(result, Timing)]
    unsupported = dict(result for result in results if not isinstance(result, Timing))
    rows = [
        [
            timing.name,
            format_bytes(timing.num_bytes),
            f"{1e6 * timing.seconds:,.1f}",
            f"{timing.algorithm_gb_per_second:.3g}",
            f"{timing.bus_gb_per_second:.3g}",
        ]
        for timing in timings
    ]
    processes = int(os.environ["WORLD_SIZE"])
    title = f"{backend}, {processes} processes on {machines} machine{'s' * (machines > 1)}, fp32"
    if rows:
        printing.print_table(["collective", "size", "microseconds", "algorithm GB/s", "bus GB/s"], rows, title)
    else:
        printing.print_line(title)
    for name, why in unsupported.items():
        printing.print_line(f"{name}: not supported by {backend} ({why})")
    if rows:
        printing.print_line(
            "algorithm: size / time. bus: algorithm times 2 (n - 1) / n for all_reduce and ring_all_reduce, "
            "(n - 1) / n for gather, all_gather, scatter, reduce_scatter and all_to_all, and 1 for the others, as in "
            "nccl-tests"
        )
    for line in ring_against_library(timings):
        printing.print_line(line)
    numbers = {"backend": backend, "processes": processes, "machines": machines, "not_offered": unsupported}
    printing.write_json_file(
        arguments.json, "collectives", facts, **numbers, timings=[asdict(timing) for timing in timings]
    )


def ring_against_library(timings: Sequence[Timing]) -> list[str]:
    """Compare the ring that is written out here with the library's all_reduce, at the smallest and the largest size."""
    ring, library = (
        {t.num_bytes: t.seconds for t in timings if t.name == f"{kind}all_reduce"} for kind in ("ring_", "")
    )
    sizes = sorted(ring.keys() & library.keys())
    ratios = [
        f"{ring[size] / library[size]:.2f} at {format_bytes(size)}" for size in dict.fromkeys(sizes[:1] + sizes[-1:])
    ]
    return [f"ring_all_reduce: its time as a multiple of all_reduce's is {', '.join(ratios)}"] if ratios else []


def format_bytes(number: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number} B"


@dataclass(frozen=True)
class Timing:
    """Time of one collective. seconds: of one call on the slowest rank. Bandwidths are in 10^9 bytes per second."""

    name: str
    num_bytes: int
    seconds: float
    algorithm_gb_per_second: float
    bus_gb_per_second: float


def bandwidths(name: str, num_bytes: int, seconds: float, world_size: int) -> tuple[float, float]:
    """Return (algorithm bandwidth, bus bandwidth) in 10^9 bytes per second.

    Args:
        name: a key of COLLECTIVES.
        num_bytes: size of one call.
        seconds: duration of one call on the slowest rank.
        world_size: number of ranks that took part.
    """
    algorithm = num_bytes / seconds / 1e9
    return algorithm, algorithm * COLLECTIVES[name].factor(world_size)


def measure(
    names: Sequence[str], sizes: Sequence[int], device: torch.device, seconds: float
) -> Iterator[Timing | tuple[str, str]]:
    """Measure collectives; to be called on all ranks.

    Args:
        names: keys of COLLECTIVES.
        sizes: message sizes in bytes.
        seconds: approximate time to repeat each size of each collective.

    Yields:
        A Timing per collective and size; (name, reason) for a collective that the backend does not support.

    Raises:
        RuntimeError: a result is wrong.
    """
    for name in names:
        try:
            _check_result(name, Buffers(sizes[0], device))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if not is_unsupported(error):
                raise
            yield name, str(error).splitlines()[0]
            continue
        for size in sizes:
            collective, buffers = COLLECTIVES[name], Buffers(size, device)
            collective.run(buffers)
            # seconds of the slowest rank, for which a training step would wait: so all ranks make as many calls
            once = _repeated(collective, buffers, 1)
            took = _repeated(collective, buffers, max(FEWEST, min(MOST, int(seconds / once))))
            yield Timing(name, buffers.num_bytes, took, *bandwidths(name, buffers.num_bytes, took, buffers.world))


def _check_result(name: str, buffers: Buffers) -> None:
    collective = COLLECTIVES[name]
    result, expected = collective.run(buffers), collective.expected(buffers.rank, buffers.world)
    if expected is None:
        return
    wanted = torch.tensor(expected, device=result.device)[:, None]
    if not bool((result.view(len(expected), -1) == wanted).all()):
        raise RuntimeError(f"{name}: rank {buffers.rank} of {buffers.world} got {result}, expected parts of {expected}")


def _repeated(collective: Collective, buffers: Buffers, count: int) -> float:
    device = buffers.whole.device
    _slowest(0.0, device)  # all ranks begin together
    began = time.perf_counter()
    for _ in range(count):
        collective.run(buffers)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _slowest((time.perf_counter() - began) / count, device)


def _slowest(seconds: float, device: torch.device) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
