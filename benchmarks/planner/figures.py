"""How far predictions are from published runs, each predicted with constants of a fit without its source."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from benchmarks.planner import cells, fits, fitting
from benchmarks.planner.names import short
from samecurve.planner import answers, memory, step_time
from samecurve.planner.hardware import Profile
from samecurve.planner.job import Job
from samecurve.specs.gpus import GIB

BANDS = (8, 32, 128, 512)  # numbers of GPUs up to which a band goes; the last one is open
# Runs out of memory that may be predicted to fit, by evidence: bound and aim in %.
MISSED = {"extrapolated": (3, 1), "states": (0, 0), "reported": (34, 17)}


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
        total_memory_gib: predicted, of all that a GPU holds, by which that is judged.
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
    total_memory_gib: float = 0

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
        job = answers.job_of_row(dict(row))
        fold = fits.fold(row["source"], job)
        misprint = row["step_s"] and fits.tflops(job, float(row["step_s"])) > job.card.matmul_tflops
        if row["status"] in ("ran", "oom") and fold in constants and not misprint:
            found.append(_case(row, job, fold, constants[fold]))
    return _with_intervals(found, runs, strangers)


def _case(row: Mapping[str, str], job: Job, fold: str, fitted: Mapping[str, Profile]) -> Case:
    constants = fits.pick(fitted, job.stack)
    total = max(memory.counted(each, "nvidia_smi") for each in memory.anatomy(job, constants)) / GIB
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
        total_memory_gib=total,
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
            job = answers.job_of_row(dict(case.row))
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


def medians(
    found: Iterable[Case], errors: Callable[[Iterable[Case]], list[float]], name: Callable[[Case], str]
) -> dict[str, float]:
    """Return the median size of the errors, by what `name` says of each run."""
    each = {key: errors(group) for key, group in by(name, found).items()}
    return {key: middle(values) for key, values in each.items() if values}


def source(case: Case) -> str:
    """Name the source; the grid is one."""
    return case.source


def band(case: Case) -> str:
    """Name the band of the number of GPUs, the first of which is `1 to 8 GPUs`."""
    gpus, lower = int(case.row["gpus"]), 1
    for upper in BANDS:
        if gpus <= upper:
            return f"{lower} to {upper} GPUs"
        lower = upper + 1
    return f"{lower} GPUs and more"


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
    covered, wrong = coverage(found), statistics.mean(flagged(found))
    regret = [*cells.regrets(found, cells.answered).values()]
    order = statistics.mean(cells.disorder(found).values())
    numbers = [
        *_errors("step time", times(found), ((15, 10), (45, 30))),
        *_of_sources("step time", found, times, ((20, 12), (30, 20))),
        _worst("step time, worst number of GPUs", medians(found, times, band), (25, 15)),
        *_errors("peak memory", memories(found), ((8, 5), (25, 15))),
        *_of_sources("peak memory", found, memories, ((12, 7), (20, 12))),
        *(
            (
                f"out of memory ({evidence}), predicted to fit",
                statistics.mean(lost),
                MISSED.get(evidence, MISSED["reported"]),
            )
            for evidence, lost in missed(found).items()
        ),
        ("runs that ran, predicted not to fit", wrong, (3, 1)),
        ("regret of the first choice, median of the cells", statistics.median(regret), (10, 5)),
        ("regret of the first choice, worst cell", max(regret), (60, 25)),
        ("1 - rank correlation of speeds, mean of the cells", order, (20, 10)),
    ]
    return [
        *(Figure(name, 100 * value, (0, bound), (0, aim)) for name, value, (bound, aim) in numbers),
        Figure("measured times inside their 80 % interval", 100 * covered[0], (65, 95), (72, 88)),
        Figure("measured memory inside its 80 % interval", 100 * covered[1], (65, 95), (72, 88)),
    ]


Number = tuple[str, float, tuple[float, float]]
"""A figure's name, its value, and its bound and aim in %."""


def _errors(name: str, errors: Sequence[float], limits: Sequence[tuple[float, float]]) -> list[Number]:
    return [
        (f"{name}, median error", middle(errors), limits[0]),
        (f"{name}, 90 % quantile of the errors", high(errors), limits[1]),
    ]


def _of_sources(
    name: str,
    found: Sequence[Case],
    errors: Callable[[Iterable[Case]], list[float]],
    limits: Sequence[tuple[float, float]],
) -> list[Number]:
    each = {short(key): value for key, value in medians(found, errors, source).items()}
    mean = (f"{name}, mean of the sources' medians", statistics.mean(each.values()), limits[0])
    return [mean, _worst(f"{name}, worst source", each, limits[1])]


def _worst(name: str, values: Mapping[str, float], limits: tuple[float, float]) -> Number:
    worst = max(values, key=lambda key: values[key])
    return f"{name} ({worst})", values[worst], limits


def summary(found: Sequence[Case]) -> list[str]:
    """Format the figures for the terminal."""
    return [f"{each.name:<80} {each.value:5.1f} %  {each.verdict}" for each in headline(found)]
