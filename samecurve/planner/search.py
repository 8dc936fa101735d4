"""Evaluates strategies for a job and ranks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samecurve.errors import ConfigurationError
from samecurve.planner import strategies
from samecurve.planner.answers import Prediction, predict
from samecurve.planner.cluster import Cluster
from samecurve.planner.job import Job
from samecurve.planner.strategies import Wanted

MOST_GPUS = 4096


@dataclass(frozen=True)
class Choice:
    """A strategy for the job and the tokens of a step. `reason` says why it cannot run there; then it has no job."""

    name: str
    job: Job | None = None
    found: Prediction | None = None
    reason: str = ""
    tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        assert self.found
        return self.tokens / self.found.seconds

    @property
    def verdict(self) -> str:
        """fits: also at the upper end of the memory interval. tight: only in the middle of it."""
        if not (self.job and self.found):
            return "cannot run"
        share = self.found.memory_interval[1] / self.found.memory_gib
        if not self.found.fits:
            return "too large"
        return "fits" if self.found.total_memory_gib * share <= self.job.memory_gib else "tight"


def evaluate(wanted: Wanted, machines: Cluster, paths: Sequence[str]) -> list[Choice]:
    """Predict each strategy, in the order given."""
    choices, tokens = [], wanted.batch.global_batch_size * wanted.batch.sequence_length
    for path in paths:
        name = path.rsplit("/", 1)[-1].removesuffix(".yaml")
        strategy = strategies.read(path, machines.gpus)
        try:
            job = strategies.job(wanted, strategy, machines)
            strategies.check(path, machines.gpus, wanted.recipe() if wanted.recipe else None)
        except ValueError as error:
            choices.append(Choice(name, reason=str(error)))
            continue
        # Host memory's bandwidth is not in the model, so that a time would be a guess.
        offloads = " (time without offloading's transfers)" if strategy.offload else ""
        choices.append(Choice(name, job, predict(job), offloads, tokens))
    return choices


def ranked(choices: Sequence[Choice]) -> list[Choice]:
    """Sort: what fits first, then by speed. Strategies within the fastest one's interval keep their order (ties)."""
    runnable = [each for each in choices if each.found]
    usable = [each for each in runnable if each.found and each.found.fits and not each.reason]
    offloading = [each for each in runnable if each.found and each.found.fits and each.reason]
    rest = [each for each in runnable if each.found and not each.found.fits]
    return [
        *sorted(usable, key=lambda each: -each.tokens_per_s),
        *offloading,
        *sorted(rest, key=lambda each: each.found.total_memory_gib if each.found else 0),
        *(each for each in choices if not each.found),
    ]


def fewest_gpus(wanted: Wanted, machines: Cluster, paths: Sequence[str]) -> tuple[int, str] | None:
    """Double the GPUs until a strategy fits. Returns (GPUs, strategy), or None up to MOST_GPUS."""
    gpus = machines.gpus * 2
    while gpus <= MOST_GPUS:
        try:
            larger = machines.scaled(gpus)
            fitting = [each for each in evaluate(wanted, larger, paths) if each.found and each.found.fits]
        except ConfigurationError:
            return None
        if fitting:
            return gpus, fitting[0].name
        gpus *= 2
    return None
