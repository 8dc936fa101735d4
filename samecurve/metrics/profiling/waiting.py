"""Idle time of a rank within a pipeline schedule, by a profiler's trace and by the schedule's order of work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from samecurve.strategy.timetables import SCHEDULES, Pass, ScheduleRun, idle_slots, order

MICROSECONDS = 1e-6


@dataclass(frozen=True)
class Waiting:
    """Time of one rank within its schedule, from a step's first work to the loss that all ranks agree on.

    Attributes:
        seconds: total over the recorded steps; `busy_seconds` of it with computation.
        passes: number of F, B, I and W in these steps.
        planned_passes: the same by the schedule's order.
        predicted_idle: share of waiting if all stages took equally long, and messages no time.
    """

    schedule: str
    rank: int
    ranks: int
    seconds: float
    busy_seconds: float
    passes: dict[str, int]
    planned_passes: dict[str, int]
    predicted_idle: float

    @property
    def idle(self) -> float:
        """Share of the time without computation."""
        return 1 - self.busy_seconds / self.seconds


def waiting(events: Iterable[dict], computing: Sequence[tuple[float, float]], on_device: bool) -> Waiting | None:
    """Measure the waiting of a rank; None if no schedule ran.

    Args:
        events: complete events of a trace.
        computing: (start, end) of each operator, or on a device of each kernel, in microseconds of the trace.
        on_device: whether kernels are the work. On a CPU also the Python code of a stage counts as its work.
    """
    events = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [(run, start_of(event), end_of(event)) for event in events if (run := ScheduleRun.of_range(event["name"]))]
    if not steps:
        return None
    works = [(work, start_of(event), end_of(event)) for event in events if (work := Pass.of_range(event["name"]))]
    busy = [*computing, *((start, end) for _, start, end in works if not on_device)]
    planned: Counter[str] = Counter()
    predicted = []
    for run, *_ in steps:
        planned += Counter(w.kind for entry in order(run.schedule, *run[1:]) for w in entry)
        idle = idle_slots(run.schedule, run.ranks, run.micro_batches, SCHEDULES[run.schedule].stages_per_rank)
        predicted.append(idle / (run.micro_batches + idle))
    first = steps[0][0]
    return Waiting(
        schedule=first.schedule,
        rank=first.rank,
        ranks=first.ranks,
        seconds=sum(end - start for _, start, end in steps) * MICROSECONDS,
        busy_seconds=sum(covered(busy, start, end) for _, start, end in steps) * MICROSECONDS,
        passes=dict(sorted(Counter(work.kind for work, *_ in works).items())),
        planned_passes=dict(sorted(planned.items())),
        predicted_idle=sum(predicted) / len(predicted),
    )


def start_of(event: dict) -> float:
    """Return when an event of a trace began, in microseconds of its clock."""
    return float(event["ts"])


def end_of(event: dict) -> float:
    return float(event["ts"]) + float(event["dur"])


Interval = tuple[float, float]


def covered(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Measure the part of a time range that is covered by intervals, which may overlap."""
    covered, reached = 0.0, start
    for first, last in sorted(intervals):
        covered += max(0.0, min(last, end) - max(first, reached))
        reached = max(reached, last)
    return covered
