"""Choices among published runs of one job: what `plan` would answer first, and whether it ranks them as they ran.

A cell has one model, kind and number of GPUs, row length and global batch, at least three measured runs, and those that
ran out of memory.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from samecurve.planner import answers, search
from samecurve.planner.answers import Prediction
from samecurve.planner.job import Job
from samecurve.planner.search import Choice

if TYPE_CHECKING:
    from benchmarks.planner.figures import Case

FEWEST_OF_A_CELL = 3
MOST = 1.0  # regret of a choice that runs out of memory
JOB = ("model", "gpus", "gpu", "seq", "global_batch")
DIFFERENCES = (0, 0.02, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4)  # of two predicted step times
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")  # by ZeRO's stage, for the order of ties


def cells(found: Iterable[Case]) -> dict[str, list[Case]]:
    """Group the runs by job and source; cells with too few measured runs are left out."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        groups[", ".join([case.source, *(case.row[key] for key in JOB)])].append(case)
    return {
        name: group
        for name, group in sorted(groups.items())
        if sum(bool(case.ran_seconds) for case in group) >= FEWEST_OF_A_CELL
    }


def regrets(found: Iterable[Case], choose: Callable[[Sequence[Case]], Case]) -> dict[str, float]:
    """Return how much slower than the best published run a choice is, by cell.

    Args:
        choose: `answered` or `fastest`, of runs that are predicted to fit and whose outcome is known.
    """
    result = {}
    for name, cell in cells(found).items():
        outcomes = [case for case in cell if case.fits and (case.ran_seconds or case.row["status"] == "oom")]
        if outcomes:
            best, first = min(case.ran_seconds for case in cell if case.ran_seconds), choose(outcomes)
            result[name] = 1 - best / first.ran_seconds if first.ran_seconds else MOST
    return result


def fastest(outcomes: Sequence[Case]) -> Case:
    """Choose the fastest prediction."""
    return min(outcomes, key=lambda case: case.predicted_seconds)


def answered(outcomes: Sequence[Case]) -> Case:
    """Choose what `plan` would print first: of those as fast as the fastest, as far as can be predicted, the simplest.

    What fits at the upper end of its memory interval comes before what is tight.
    """
    choices = [_choice(case) for case in outcomes]
    cases = {id(choice.prediction): case for choice, case in zip(choices, outcomes, strict=True)}
    return cases[id(search.ranked(choices)[0].prediction)]


def order(found: Iterable[Case]) -> list[tuple[float, float, int, float]]:
    """Count how often the faster one of two runs was predicted to be faster, by how far the predictions differ.

    The runs of a pair have one source, stack, model, batch, row length and number of GPUs.

    Returns:
        (from, to, pairs, share), the ends as shares of the shorter step; without pairs a row is left out.
    """
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in found:
        if case.seconds:
            groups[(case.source, case.row["stack"], *(case.row[key] for key in JOB))].append(case)
    right: dict[tuple[float, float], list[bool]] = {ends: [] for ends in pairwise(DIFFERENCES)}
    for one, other in (pair for group in groups.values() for pair in combinations(group, 2)):
        ratio = one.predicted_seconds / other.predicted_seconds
        difference = max(ratio, 1 / ratio) - 1
        for (low, high), seen in right.items():
            if low <= difference < high:
                assert one.seconds and other.seconds
                seen.append((ratio > 1) == (one.seconds > other.seconds))
    return [(*ends, len(seen), statistics.mean(seen)) for ends, seen in right.items() if seen]


def _choice(case: Case) -> Choice:
    job = answers.job_of_row(dict(case.row))
    found = Prediction(
        case.predicted_memory_gib, case.memory_interval, case.total_memory_gib, case.fits, "",
        case.predicted_seconds, case.seconds_interval,
    )  # fmt: skip
    tokens = job.micro_batch * job.seq * job.grad_accum * job.dims.dp
    return Choice(_strategy(job), job=job, prediction=found, tokens=tokens)


def _strategy(job: Job) -> str:
    """Name the file of configs/ that a run resembles, for its place among ties."""
    dims = job.dims
    if dims.pp > 1:
        return "pipeline"
    return "hsdp" if job.zero == 3 and job.shard < dims.dp else STRATEGIES[job.zero]


def disorder(found: Iterable[Case]) -> dict[str, float]:
    """Return 1 - Spearman's correlation of predicted and measured speed, by cell: 0 in the same order, 2 in reverse."""
    result = {}
    for name, cell in cells(found).items():
        ran = [case for case in cell if case.ran_seconds]
        predicted, measured = [case.predicted_seconds for case in ran], [case.ran_seconds or 0.0 for case in ran]
        if len({*predicted}) > 1 and len({*measured}) > 1:
            result[name] = 1 - statistics.correlation(_ranks(predicted), _ranks(measured))
    return result


def _ranks(values: Sequence[float]) -> list[float]:
    """Rank values in ascending order; equal ones share the mean of their ranks."""
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    return [statistics.mean(places[value]) for value in values]
