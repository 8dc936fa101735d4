"""Fits a stack's constants to measured step times: a search along one constant at a time, no library needed."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from samecurve.planner import memory, step_time
from samecurve.planner.answers import fullest_gib
from samecurve.planner.hardware import Profile
from samecurve.planner.job import Job
from samecurve.specs.gpus import GIB

# Legal ranges. A share is of something measured, so that more than about one would mean a wrong model.
TIME_BOUNDS = {
    "matmul_share": (0.4, 1.1),
    "attention_share": (0.15, 1.0),
    "traffic": (0.3, 3.0),
    "layer_floor_us": (30.0, 8000.0),
    "rank_floor_us": (1.0, 3000.0),
    "pipeline_rank_floor_us": (1.0, 8000.0),
    "ring_step_us": (1.0, 100.0),
    "overlap": (0.05, 1.0),
    "network_share": (0.05, 1.1),
    "step_us": (1000.0, 300000.0),
}
# An unknown stack launches a layer's hundred kernels in 10 us each; one slow stack must not decide otherwise.
DEFAULT_BOUNDS = {**TIME_BOUNDS, "layer_floor_us": (30.0, 1500.0)}
MEMORY_BOUNDS = {"gathered_inputs": (5.0, 200.0), "logits_bytes": (4.0, 20.0)}
CLIPPED = 0.7  # larger errors, as logarithms, count as this, so that a broken run does not bend a constant
CLIPPED_MEMORY = 0.25
SLOW_WEIGHT = 0.5  # of runs that are slow for their stack's reasons
PRIOR = 0.004  # cost of moving a share e-fold from the default
LOOSE_PRIOR = 0.0004  # the same for floors and memory, which differ by orders of magnitude between stacks
ENOUGH = 30.0  # weight of all sources, below which a stack has too few of them to stray far from the default
FIRST_STEP, LAST_STEP = 0.3, 0.02
JUMPS = (8.0, 3.0)


@dataclass(frozen=True)
class Measured:
    """A run: its job, what was measured (None: no target) and where it comes from. ran: so that it did fit."""

    job: Job
    source: str
    seconds: float | None
    memory_gib: float | None
    weight: float = 1.0
    ran: bool = True


def time_error(run: Measured, constants: Profile) -> float:
    """Return the logarithm of predicted over measured step time."""
    assert run.seconds
    return math.log(step_time.breakdown(run.job, constants).total / run.seconds)


def predicted_memory_gib(job: Job, constants: Profile | None = None) -> float:
    """Return the peak that the job's counter shows, in GiB (see `fullest_gib`)."""
    return fullest_gib(job, memory.anatomy(job, constants))


def memory_error(run: Measured, constants: Profile) -> float:
    """Return log(predicted / measured) memory; for a run that only ran, log(predicted / the GPU's), at least 0."""
    if run.memory_gib is None:
        total = max(memory.counted(each, "nvidia_smi") for each in memory.anatomy(run.job, constants))
        return max(0.0, math.log(total / (run.job.memory_gib * GIB)))
    return math.log(predicted_memory_gib(run.job, constants) / run.memory_gib)


def _cost(
    runs: Iterable[Measured], constants: Profile, error: Callable[[Measured, Profile], float], clipped: float
) -> float:
    """Mean of the sources' mean errors; a source counts by the root of its rows."""
    by_source: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for run in runs:
        # slow runs take at least twice the best time, about e^CLIPPED, so that all of them would be clipped
        limit = clipped if run.weight == 1 else 4 * clipped
        sums = by_source[run.source]
        sums[0] += run.weight * min(abs(error(run, constants)), limit)
        sums[1] += run.weight
    weights = {source: math.sqrt(sums[1]) for source, sums in by_source.items()}
    return sum(weights[source] * sums[0] / sums[1] for source, sums in by_source.items()) / sum(weights.values())


def _caution(runs: Iterable[Measured]) -> float:
    """Factor of the priors: a mean over few sources is a poor one, as the square of the weight that they have."""
    weight = sum(math.sqrt(count) for count in Counter(run.source for run in runs).values())
    return max(1.0, ENOUGH / weight) ** 2


def fit(
    runs: Sequence[Measured],
    start: Profile,
    error: Callable[[Measured, Profile], float] = time_error,
    clipped: float = CLIPPED,
    bounds: dict[str, tuple[float, float]] | None = None,
) -> Profile:
    """Search the constants that predict the runs best, near `start`.

    Args:
        start: constants to begin with; priors pull the result towards them.
        error: logarithmic error of one run's prediction; 0 is exact.
        clipped: larger errors count as this one, or as 4 times this one for a run whose weight is not 1.
        bounds: (lowest, highest) by name of the constants to search; None for those of time.
    """
    bounds = TIME_BOUNDS if bounds is None else bounds
    caution = _caution(runs)

    def cost(constants: Profile) -> float:
        moved = caution * sum(
            (LOOSE_PRIOR if name.endswith("_us") or name in MEMORY_BOUNDS else PRIOR)
            * math.log(getattr(constants, name) / getattr(start, name)) ** 2
            for name in bounds
        )
        return _cost(runs, constants, error, clipped) + moved

    best, least = start, cost(start)
    steps = [*JUMPS, FIRST_STEP]  # a floor does nothing until it is high, so that small steps would not find it
    while steps[0] > LAST_STEP:
        better = False
        for name, (low, high) in bounds.items():
            if steps[0] in JUMPS and not name.endswith("_us"):
                continue
            for factor in (1 + steps[0], 1 / (1 + steps[0])):
                value = min(high, max(low, getattr(best, name) * factor))
                tried = replace(best, **{name: value})
                if (found := cost(tried)) < least - 1e-6:
                    best, least, better = tried, found, True
        if not better:
            steps = steps[1:] or [steps[0] / 2]
    return best
