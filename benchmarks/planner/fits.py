"""Fits of the planner's constants to published runs, with and without each source."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.planner import fitting
from benchmarks.planner.fitting import Measured
from samecurve.planner import answers
from samecurve.planner.answers import situations
from samecurve.planner.hardware import Profile
from samecurve.planner.job import Job

GRID = "Ultra-Scale Playbook grid"
FEWEST_RESIDUALS = 12
MOST_OF_A_SOURCE = 60
# Megatron's kernels are fused, about fifty launches of 10 us in a layer. No public run of it waits for its host, so
# that a fit does not move this; the default's floor is that of layers in single operations.
FUSED_FLOOR_US = {"megatron": 500.0}
EVERY_SLOW = 4  # of the slow runs one in so many is fitted, for speed


@dataclass(frozen=True)
class LeftOut:
    """A run, and the constants of a fit without its part of the table; known: whether they are those of its stack."""

    run: Measured
    known: bool
    constants: Profile

    @cached_property
    def time_error(self) -> float:
        """Logarithm of predicted over measured step time."""
        return fitting.time_error(self.run, self.constants)

    @cached_property
    def memory_error(self) -> float:
        """Logarithm of predicted over measured memory."""
        return fitting.memory_error(self.run, self.constants)


def measured(rows: Iterable[Mapping[str, str]]) -> list[Measured]:
    """Pick the runs with a usable time or memory, and some of those that are slow for their stack's reasons."""
    found, slow = [], 0
    for row in rows:
        job = answers.job_of_row(dict(row))
        seconds = float(row["step_s"]) if row["time_ok"] == "1" else None
        memory = float(row["memory_gib"]) if row["memory_ok"] == "1" else None
        weight = 1.0
        if seconds is None and is_slow(row):
            slow += 1
            if slow % EVERY_SLOW == 0:
                seconds, weight = float(row["step_s"]), fitting.SLOW_WEIGHT
        if seconds and tflops(job, seconds) > job.card.matmul_tflops:
            print(f"{row['id']}: left out, {tflops(job, seconds):.0f} TFLOP/s on a {job.gpu_kind} is a misprint")
            continue
        if seconds or memory:
            found.append(Measured(job, row["source"], seconds, memory, weight, row["status"] == "ran"))
    return found


def is_slow(row: Mapping[str, str]) -> bool:
    """Whether a run reached less than half of the best speed of its model and GPU count: a time, but no target."""
    return row["note"].startswith("slow")


def tflops(job: Job, seconds: float) -> float:
    """TFLOP/s of a GPU in the layers' products."""
    tokens = job.tokens * job.grad_accum * job.dims.dp * job.dims.cp
    return 6 * job.shape.layers * job.shape.active_layer_parameters * tokens / seconds / job.dims.world_size / 1e12


def fold(source: str, job: Job) -> str:
    """Name what is left out together: a source; of the grid, which is one source of one stack, a number of GPUs."""
    return f"{source}: {job.dims.world_size} GPUs" if source == GRID else source


def fit_default(runs: Sequence[Measured]) -> Profile:
    """Fit the constants of an unknown stack to all stacks, with the same number of runs of each large source."""
    plain, by_source = [], defaultdict(list)
    for run in runs:
        if run.weight == 1:
            by_source[run.source].append(run)
    for several in by_source.values():
        plain += several[:: 1 + len(several) // MOST_OF_A_SOURCE]
    timed = [run for run in plain if run.seconds]
    default = fitting.fit(timed, Profile(), bounds=fitting.DEFAULT_BOUNDS)
    return _fit_memory([run for run in plain if run.memory_gib or run.ran], default)


def fit_all(runs: Sequence[Measured], wanted: set[str]) -> dict[str, Profile]:
    """Fit the default to all stacks, then each wanted stack near the default."""
    default = fit_default(runs)
    found = {"default": default}
    for stack in sorted(wanted & {run.job.stack for run in runs}):
        mine = [run for run in runs if run.job.stack == stack]
        timed = [run for run in mine if run.seconds]
        held = [run for run in mine if run.memory_gib or (run.ran and run.weight == 1)]
        floor = min(default.layer_floor_us, FUSED_FLOOR_US.get(stack, math.inf))
        start = replace(default, layer_floor_us=floor)
        constants = fitting.fit(timed, start) if timed else start
        found[stack] = _fit_memory(held, constants) if held else constants
    return found


def _fit_memory(runs: Sequence[Measured], start: Profile) -> Profile:
    return fitting.fit(runs, start, fitting.memory_error, fitting.CLIPPED_MEMORY, fitting.MEMORY_BOUNDS)


def constants_without(runs: Sequence[Measured]) -> dict[str, dict[str, Profile]]:
    """Fit the constants without each fold. Returns them by fold and stack."""
    folds = sorted({fold(run.source, run.job) for run in runs})
    inside = {name: [run for run in runs if fold(run.source, run.job) == name] for name in folds}
    rests = [[run for run in runs if fold(run.source, run.job) != name] for name in folds]
    stacks = [{run.job.stack for run in inside[name]} for name in folds]
    with ProcessPoolExecutor() as pool:
        return dict(zip(folds, pool.map(fit_all, rests, stacks), strict=True))


def left_out(runs: Sequence[Measured], constants: Mapping[str, Mapping[str, Profile]]) -> list[LeftOut]:
    """Pair each run with the constants of the fit without its fold."""
    found = []
    for run in runs:
        fitted = constants[fold(run.source, run.job)]
        found.append(LeftOut(run, run.job.stack in fitted, pick(fitted, run.job.stack)))
    return found


def left_out_stacks(runs: Sequence[Measured]) -> list[LeftOut]:
    """Pair each run with the default constants of a fit without its stack."""
    found = []
    for stack in sorted({run.job.stack for run in runs}):
        default = fit_default([run for run in runs if run.job.stack != stack])
        found += [LeftOut(run, False, default) for run in runs if run.job.stack == stack]
    return found


def pick(constants: Mapping[str, Profile], stack: str) -> Profile:
    return constants.get(stack, constants["default"])


def timed(runs: Iterable[LeftOut]) -> list[LeftOut]:
    """Keep the runs whose time is a target."""
    return [each for each in runs if each.run.seconds and each.run.weight == 1]


def held(runs: Iterable[LeftOut]) -> list[LeftOut]:
    """Keep the runs whose memory is a target."""
    return [each for each in runs if each.run.memory_gib]


def residuals(runs: Iterable[LeftOut], strangers: Iterable[LeftOut], error: str) -> dict[str, list[float]]:
    """Return the 10 % and 90 % quantiles of log(measured / predicted) by situation.

    An unknown stack's come from stacks that were left out, each with the same weight.

    Args:
        error: time_error or memory_error.
    """
    found, by_stack = defaultdict(list), defaultdict(list)
    for each in runs:
        for key in situations(each.run.job, each.known)[:2] if each.known else ():
            found[key].append(-getattr(each, error))
    for each in strangers:
        by_stack[each.run.job.stack].append(-getattr(each, error))
    for values in by_stack.values():
        if len(values) > 1:
            found["unknown"] += statistics.quantiles(values, n=20, method="inclusive")
    result = {}
    for key, values in sorted(found.items()):
        if len(values) >= FEWEST_RESIDUALS:
            cuts = statistics.quantiles(values, n=10)
            result[key] = [round(cuts[0], 4), round(cuts[-1], 4)]
    return result
