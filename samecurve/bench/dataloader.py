"""Benchmark of data loading: rows per second by number of worker processes, and how many workers are enough."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from samecurve.bench import printing, timing
from samecurve.data.batches import StepBatches
from samecurve.distributed.affinity import num_cores, share_of_cores
from samecurve.errors import ConfigurationError
from samecurve.reports.history import History
from samecurve.storage.records import read_record
from samecurve.tasks import registry

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.data.datasets.base import Rows

WARM_UP_STEPS = 5
MARGIN = 1.2  # a loader that only just keeps up makes training wait at every irregular step
GAIN = 1.1
_MANY_STEPS = 10**9
_OF_RUN = {"recipe": {"batch": {"global_batch_size": int}}, "data_parallel_size": range(1, 2**31)}
_OF_STEP = {"step_seconds", "data_wait_fraction"}
CORES = Path("/sys/devices/system/cpu")


def cores_of_one_process(num_processes: int) -> list[int]:
    """List the cores of one process if `num_processes` share this host.

    Raises ConfigurationError if there are fewer cores than processes, or several processes and no CPU affinity.
    """
    option = f"--processes_per_node: found {num_processes}, but"
    if num_processes > num_cores():
        raise ConfigurationError(f"{option} this host has {num_cores()} cores; give at most one process per core")
    if hasattr(os, "sched_setaffinity"):
        return sorted(os.sched_getaffinity(0), key=_physical)[: share_of_cores(num_processes)]
    if num_processes > 1:
        raise ConfigurationError(f"{option} this system cannot bind a process to some of its cores; use 1")
    return list(range(num_cores()))


@contextlib.contextmanager
def bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Restrict this thread, and all threads and processes it starts, to `cores` in the body, if the system can."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _physical(core: int) -> tuple[int, int]:
    """Sort key that places hardware threads of one physical core next to each other.

    A hardware thread on a physical core that nothing else uses would be measured as too fast.
    """
    siblings = CORES / f"cpu{core}" / "topology" / "thread_siblings_list"  # "0,32" or "0-1"
    first = re.match(r"\d+", siblings.read_text(encoding="ascii")) if siblings.exists() else None
    return int(first[0]) if first else core, core


def rows_per_second(rows: Rows, recipe: Recipe, num_workers: int, data_parallel_size: int, seconds: float) -> float:
    """Measure the rows per second of one rank that only reads.

    Args:
        num_workers: processes that prepare the steps; 0 uses a thread.
        data_parallel_size: number of ranks among which a step's rows are divided; the first one's share is read.
        seconds: least duration of the measurement, after WARM_UP_STEPS steps and those that the workers prepare ahead.
    """
    shard = 0, data_parallel_size
    prepared = iter(StepBatches(rows, recipe.seed, recipe.batch, shard, _MANY_STEPS, num_workers=num_workers))
    for _ in range(WARM_UP_STEPS + 2 * num_workers):  # includes steps prefetched while waiting for the first one
        next(prepared)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(prepared)
        steps += 1
    took = time.perf_counter() - began
    prepared.close()
    return steps * recipe.batch.global_batch_size / data_parallel_size / took


def rows_per_second_of_run(run: Path) -> float:
    """Compute the rows per second and rank that a run would read if it never waited: the median of its steps.

    Raises ConfigurationError if the folder has no run with two finished steps.
    """
    facts = read_record(run / "run.json", _OF_RUN).value
    _, *rest = list(History.read(run).records) or [{}]  # the first step starts up
    metrics = [record for record in rest if _OF_STEP <= record.keys()]
    if not facts or not metrics:
        raise ConfigurationError(f"--run: {run} has no run with two finished steps (run.json, metrics.jsonl)")
    own = facts["recipe"]["batch"]["global_batch_size"] / facts["data_parallel_size"]
    return own / median(record["step_seconds"] * (1 - record["data_wait_fraction"]) for record in metrics)


def fewest_workers(rates: Mapping[int, float], needed: float | None) -> int | None:
    """Choose the smallest sufficient number of workers.

    Args:
        rates: rows per second by number of workers.
        needed: rows per second that training needs; None if unknown.

    Returns:
        The smallest number that reaches MARGIN times `needed`, None if none does. If `needed` is unknown, the smallest
        number that no larger one beats by the factor GAIN.
    """
    counts = sorted(rates)
    if needed is not None:
        return next((count for count in counts if rates[count] >= MARGIN * needed), None)
    best = max(rates.values())
    return next(count for count in counts if rates[count] * GAIN >= best)


def run(arguments: argparse.Namespace, recipe: Recipe) -> int:
    """Run the command `bench dataloader`."""
    size, processes = arguments.data_parallel_size, arguments.processes_per_node
    cores = cores_of_one_process(processes)
    facts = timing.describe_environment(timing.default_device())
    counts = printing.parse_integers("--num_workers", arguments.num_workers)
    counts = counts or [0, *(1 << power for power in range(6) if 1 << power <= len(cores))]
    needed = rows_per_second_of_run(arguments.run) if arguments.run else arguments.needed
    rows = registry.load_task(recipe).train
    printing.print_line(timing.environment_line(facts))
    with bound_to(cores):
        rates = {count: rows_per_second(rows, recipe, count, size, arguments.seconds) for count in counts}
    shown = [[str(count), f"{rate:,.0f}"] for count, rate in rates.items()]
    title = f"rows per second of one rank that only reads, on {len(cores)} of {facts['cores']} cores"
    printing.print_table(["workers", "rows/s"], shown, title)
    best = fewest_workers(rates, needed)
    where = f"with {processes} process{'es' * (processes > 1)} on this host"
    if needed is None:
        advice = "more workers are hardly faster; --run RUN compares with what training needs"
        verdict = f"data.num_workers={best}, {where}: {advice}"
    else:
        verdict = f"data.num_workers={best} is enough {where}: training needs {needed:,.0f} rows/s"
        if best is None:
            verdict = f"no number of workers is enough {where}: training needs {needed:,.0f} rows/s"
            verdict += f", with {MARGIN:g} as margin"
    printing.print_line(verdict)
    numbers = {"processes_per_node": processes, "rows_per_second": rates, "needed": needed, "enough": best}
    printing.write_json_file(arguments.json, "dataloader", facts, recipe=arguments.recipe, **numbers)
    return 0
