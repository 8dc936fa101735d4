"""Predictions with intervals, one per row of a table of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samecurve.planner import memory, runs_file, step_time
from samecurve.planner.calibration import Calibration
from samecurve.planner.constants import ASSUMED, Constant
from samecurve.planner.hardware import canonical, is_unknown
from samecurve.planner.job import Job
from samecurve.planner.profiles import BY_COST, is_known, shipped

ONE_NODE, LARGE = 8, 128
UNMEASURED = Constant(
    1.6,
    "multiple of an interval's width",
    ASSUMED,
    "where no public run is near: experts, fp8, fp32, context parallelism, offloading, other GPUs, more GPUs",
)
UNKNOWN_GPU = Constant(math.log(2), "logarithm of measured by predicted", ASSUMED, "a GPU counted as an A100, by name")


def _widths(width: float, why: str) -> tuple[Constant, Constant]:
    low, high = (Constant(end, "logarithm of measured by predicted", ASSUMED, why) for end in (-width, width))
    return low, high


DEFAULT_WIDTHS = _widths(0.35, "where profiles.json has no residuals")
CPU_WIDTHS = {
    "time": _widths(1.4, "a factor of 4, as no public run is one on a CPU"),
    "memory": _widths(0.3, "no public run is one on a CPU"),
}


@dataclass(frozen=True)
class Held:
    """Memory of a job with its 80 % interval, and whether it fits."""

    memory_gib: float
    memory_interval: tuple[float, float]
    total_memory_gib: float
    fits: bool
    binding: str

    @property
    def total_interval(self) -> tuple[float, float]:
        """80 % interval of all that a GPU holds, in GiB."""
        share = self.total_memory_gib / self.memory_gib
        low, high = self.memory_interval
        return low * share, high * share

    def verdict(self, limit_gib: float) -> str:
        """fits: also at the upper end of the memory interval. tight: only in the middle of it."""
        if not self.fits:
            return "too large"
        return "fits" if self.total_interval[1] <= limit_gib else "tight"


@dataclass(frozen=True)
class Prediction(Held):
    """Step time and memory of a job, each with an 80 % interval, and whether it fits."""

    seconds: float
    seconds_interval: tuple[float, float]


def situations(job: Job, known: bool | None = None) -> list[str]:
    """List the keys under which residuals of similar runs are found, the most similar first."""
    gpus = job.layout.gpus
    size = "one node" if gpus <= ONE_NODE else "network" if gpus <= LARGE else "large"
    known = is_known(job.stack) if known is None else known
    return [f"{job.stack} {size}", job.stack, "unknown"] if known else ["unknown"]


def interval(
    value: float, job: Job, residuals: Mapping[str, Sequence[float]], known: bool | None = None
) -> tuple[float, float]:
    """Multiply a value by the 10 % and 90 % quantiles of measured over predicted in similar runs left out of a fit.

    A situation is often one source's, so that its interval is not narrower than its whole stack's.

    Args:
        residuals: their logarithms by situation.
        known: whether the value was predicted with constants of the job's own stack; None: as shipped.
    """
    *similar, unknown = situations(job, known)
    found = [residuals[key] for key in similar if key in residuals] or [residuals.get(unknown, DEFAULT_WIDTHS)]
    low, high = min(low for low, _ in found), max(high for _, high in found)
    strange = _is_new(job) or job.offload or job.shape.experts or job.layout.cp > 1
    wider = UNMEASURED if strange else 1
    # all residuals of a situation may have one sign, yet the interval has to contain the prediction
    return value * math.exp(wider * min(low, 0)), value * math.exp(wider * max(high, 0))


def _is_new(job: Job) -> bool:
    """Whether no public run has the job's GPU, number of GPUs or precision."""
    public = shipped().get("public", {})
    kinds, most = public.get("gpus", ()), public.get("most_gpus", math.inf)
    other = job.gpu_kind and canonical(job.gpu_kind) not in kinds
    return bool(job.precision in ("fp8", "fp32") or other or job.layout.gpus > most)


def _interval(value: float, job: Job, quantity: str) -> tuple[float, float]:
    """Return the interval of `quantity`, time or memory: the calibration's, if it has one, else that of public runs."""
    learnt = getattr(job.calibration, f"{quantity}_interval", None)
    if learnt or job.gpu_kind == "cpu":
        low, high = learnt or CPU_WIDTHS[quantity]
        return value * math.exp(low), value * math.exp(high)
    low, high = interval(value, job, shipped().get("residuals", {}).get(quantity, {}))
    if quantity == "time" and is_unknown(job.gpu_kind):
        return min(low, value * math.exp(-UNKNOWN_GPU)), max(high, value * math.exp(UNKNOWN_GPU))
    return low, high


def predict(job: Job) -> Prediction:
    """Predict one job."""
    return prediction(job, hold(job), step_time.breakdown(job).total)


def prediction(job: Job, held: Held, seconds: float) -> Prediction:
    """Put memory and step time of one job together."""
    return Prediction(*vars(held).values(), seconds=seconds, seconds_interval=_interval(seconds, job, "time"))


def hold(job: Job) -> Held:
    """Predict the memory of one job, without its step time."""
    classes = memory.anatomy(job)
    shown = fullest_gib(job, classes)
    # what fits is judged by all that a GPU holds, whichever counter `shown` is of
    fullest = max(classes, key=lambda each: each.peak)
    total = memory.counted(fullest, "nvidia_smi") / memory.GIB
    return Held(shown, _interval(shown, job, "memory"), total, total <= job.memory_gib, fullest.binding)


def fullest_gib(job: Job, classes: Sequence[memory.Anatomy]) -> float:
    """Return the GiB that the job's counter shows of the rank with the most; in nanotron's grid of the first stage."""
    shown = classes[:1] if job.stack in BY_COST else classes
    return max(memory.counted(each, job.memory_kind) for each in shown) / memory.GIB


def answer(row: dict[str, str], learnt: Calibration | None = None) -> dict:
    """Answer one row of a table of runs in the form of `plan --runs`; on the hardware of `learnt`, with its factors."""
    try:
        job = runs_file.job(row)
        if learnt and learnt.kind == canonical(job.gpu_kind):
            job = replace(job, calibration=learnt)
        found = predict(job)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        # one strange row must not end the answers of a whole table
        return {"id": row["id"], "unsupported": str(error)}
    low, high = found.seconds_interval
    least, most = found.memory_interval
    return {
        "id": row["id"],
        "step_seconds": found.seconds,
        "step_seconds_low": low,
        "step_seconds_high": high,
        "peak_memory_gib": found.memory_gib,
        "peak_memory_gib_low": least,
        "peak_memory_gib_high": most,
        "fits": found.fits,
        "binding": found.binding,
    }
