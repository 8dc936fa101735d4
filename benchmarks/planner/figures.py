"""How far predictions are from published runs, each predicted with constants of a fit without its source."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from benchmarks.planner import fits
from samecurve.planner import answers, fitting, memory, runs_file, step_time
from samecurve.planner.job import Job
from samecurve.planner.profiles import Profile

FEWEST_OF_A_CELL = 3
MOST = 1.0  # regret of a choice that runs out of memory


@dataclass(frozen=True)
class Case:
    """A published run and its prediction.

    Attributes:
        fold: what was left out of the fit together with it.
        seconds, memory_gib: measured; None where they are no target.
        ran_seconds: measured, also where a run is slow for its stack's reasons and therefore no target.
        known: whether other runs of its stack were in the fit.
        seconds_interval, memory_interval: of 80 %, by the residuals of the other folds.
        fits: whether the prediction fits into the GPU.
    """

    row: Mapping[str, str]
    fold: str
    known: bool
    seconds: float | None
    memory_gib: float | None
    ran_seconds: float | None
    predicted_seconds: float
    predicted_memory_gib: float
    fits: bool
    seconds_interval: tuple[float, float] = (0, 0)
    memory_interval: tuple[float, float] = (0, 0)

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def time_error(self) -> float:
        """predicted / measured - 1."""
        assert self.seconds
        return self.predicted_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        """predicted / measured - 1."""
        assert self.memory_gib
        return self.predicted_memory_gib / self.memory_gib - 1


def cases(
    rows: Iterable[Mapping[str, str]],
    runs: Sequence[fits.LeftOut],
    strangers: Sequence[fits.LeftOut],
    constants: Mapping[str, Mapping[str, Profile]],
) -> list[Case]:
    """Predict all runs with an outcome: those that ran and those that ran out of memory.

    Args:
        rows: of the table.
        runs: its targets, with constants of a fit without their fold.
        strangers: the same without their stack.
        constants: of the fits, by what was left out and by stack.
    """
    found = []
    for row in rows:
        job = runs_file.job(dict(row))
        fold = fits.fold(row["source"], job)
        misprint = row["step_s"] and fits.tflops(job, float(row["step_s"])) > job.card.matmul_tflops
        if row["status"] in ("ran", "oom") and fold in constants and not misprint:
            found.append(_case(row, job, fold, constants[fold]))
    return _with_intervals(found, runs, strangers)


def _case(row: Mapping[str, str], job: Job, fold: str, fitted: Mapping[str, Profile]) -> Case:
    constants = fits.pick(fitted, job.stack)
    total = max(memory.counted(each, "nvidia_smi") for each in memory.anatomy(job, constants)) / memory.GIB
    usable = row["time_ok"] == "1"
    seconds = float(row["step_s"]) if row["step_s"] and (usable or fits.is_slow(row)) else None
    return Case(
        row, fold, job.stack in fitted,
        seconds if usable else None,
        float(row["memory_gib"]) if row["memory_ok"] == "1" else None,
        seconds,
        step_time.breakdown(job, constants).total,
        fitting.predicted_memory_gib(job, constants),
        total <= job.memory_gib,
    )  # fmt: skip


def _with_intervals(
    found: Sequence[Case], runs: Sequence[fits.LeftOut], strangers: Sequence[fits.LeftOut]
) -> list[Case]:
    """Add each case's intervals, from the errors of other folds; those of other stacks where its own is unknown."""
    result = []
    for fold in dict.fromkeys(each.fold for each in found):
        inside = [each for each in found if each.fold == fold]
        others = [each for each in runs if fits.fold(each.run.source, each.run.job) != fold]
        strange = [each for each in strangers if each.run.source != inside[0].source]
        widths = {
            "time": fits.residuals(fits.timed(others), fits.timed(strange), "time_error"),
            "memory": fits.residuals(fits.held(others), fits.held(strange), "memory_error"),
        }
        for case in inside:
            job = runs_file.job(dict(case.row))
            seconds = answers.interval(case.predicted_seconds, job, widths["time"], case.known)
            held = answers.interval(case.predicted_memory_gib, job, widths["memory"], case.known)
            result.append(replace(case, seconds_interval=seconds, memory_interval=held))
    return result


def by(name: Callable[[Case], str], found: Iterable[Case]) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        groups[name(case)].append(case)
    return dict(sorted(groups.items()))


def middle(errors: Iterable[float]) -> float:
    """Median size of errors."""
    return statistics.median(map(abs, errors))


def high(errors: Iterable[float]) -> float:
    """90 % quantile of the sizes of errors."""
    sizes = sorted(map(abs, errors))
    return sizes[ceil(0.9 * len(sizes)) - 1]


def times(found: Iterable[Case]) -> list[float]:
    return [case.time_error for case in found if case.seconds]


def memories(found: Iterable[Case]) -> list[float]:
    return [case.memory_error for case in found if case.memory_gib]


def mean_of_sources(found: Iterable[Case], errors: Callable[[Iterable[Case]], list[float]]) -> float:
    """Mean of the sources' medians; the grid is one source."""
    each = [errors(group) for group in by(lambda case: case.source, found).values()]
    return statistics.mean(middle(values) for values in each if values)


def missed(found: Iterable[Case]) -> dict[str, list[bool]]:
    """Say of each run that ran out of memory whether it is predicted to fit, by the evidence."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for case in found:
        if case.row["status"] == "oom":
            groups[case.row["oom_evidence"]].append(case.fits)
    return dict(sorted(groups.items()))


def flagged(found: Iterable[Case]) -> list[bool]:
    """Say of each run that ran whether it is predicted not to fit."""
    return [not case.fits for case in found if case.row["status"] == "ran"]


def coverage(found: Iterable[Case]) -> tuple[float, float]:
    """Share of the measured times, and of the measured memory, that lie inside their intervals."""
    time, held = [], []
    for case in found:
        if case.seconds:
            time.append(case.seconds_interval[0] <= case.seconds <= case.seconds_interval[1])
        if case.memory_gib:
            held.append(case.memory_interval[0] <= case.memory_gib <= case.memory_interval[1])
    return statistics.mean(time), statistics.mean(held)


def regrets(found: Iterable[Case]) -> dict[str, float]:
    """Return how much slower than the best published run the first choice is, by cell.

    A cell has one model, GPU, number of GPUs, row length and global batch, at least three measured runs, and those that
    ran out of memory. The first choice is the fastest prediction of those that are predicted to fit.
    """
    keys = ("model", "gpus", "gpu", "seq", "global_batch")
    cells = by(lambda case: ", ".join([case.source, *(case.row[key] for key in keys)]), found)
    result = {}
    for name, cell in cells.items():
        ran = [case.ran_seconds for case in cell if case.ran_seconds]
        outcomes = [case for case in cell if case.fits and (case.ran_seconds or case.row["status"] == "oom")]
        if len(ran) >= FEWEST_OF_A_CELL and outcomes:
            first = min(outcomes, key=lambda case: case.predicted_seconds)
            result[name] = 1 - min(ran) / first.ran_seconds if first.ran_seconds else MOST
    return result


@dataclass(frozen=True)
class Figure:
    """A figure beside the bound that the planner has to keep and the aim, in %: the lowest and the highest value."""

    name: str
    value: float
    bound: tuple[float, float]
    aim: tuple[float, float]

    @property
    def verdict(self) -> str:
        inside = [low <= self.value <= high for low, high in (self.bound, self.aim)]
        return "aim reached" if inside[1] else "bound kept" if inside[0] else "missed"


def headline(found: Sequence[Case]) -> list[Figure]:
    """List the figures by which the planner is judged, in %."""
    regret = regrets(found)
    lost = [each for values in missed(found).values() for each in values]
    covered = coverage(found)
    numbers = (
        ("step time, median error", middle(times(found)), (0, 15), (0, 10)),
        ("step time, mean of the sources' medians", mean_of_sources(found, times), (0, 20), (0, 12)),
        ("peak memory, median error", middle(memories(found)), (0, 8), (0, 5)),
        ("runs that ran out of memory, predicted to fit", statistics.mean(lost), (0, 34), (0, 0)),
        ("runs that ran, predicted not to fit", statistics.mean(flagged(found)), (0, 3), (0, 3)),
        ("regret of the first choice, median of the cells", statistics.median(regret.values()), (0, 10), (0, 5)),
        ("measured times inside their 80 % interval", covered[0], (65, 95), (72, 88)),
        ("measured memory inside its 80 % interval", covered[1], (65, 95), (72, 88)),
    )
    return [Figure(name, 100 * value, bound, aim) for name, value, bound, aim in numbers]


def summary(found: Sequence[Case]) -> list[str]:
    """Format the figures for the terminal."""
    return [f"{each.name:<50} {each.value:5.1f} %  {each.verdict}" for each in headline(found)]
