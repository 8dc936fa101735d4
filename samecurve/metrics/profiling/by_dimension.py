"""Communication of a profile by dimension of the run's mesh: calls, bytes, time, and how much of the time is hidden.

Communication is hidden while the rank computes, and exposed otherwise. Different dimensions may communicate at the same
time, so that their times may add up to more than that of all communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from samecurve.metrics.profiling.collectives import Call, Kernel
from samecurve.metrics.profiling.waiting import Interval, covered

_MICROSECONDS = 1e-6


@dataclass(frozen=True)
class Communication:
    """Calls on this rank; totals over the recorded steps.

    Attributes:
        calls: number of calls.
        num_bytes: sum over the calls of the larger of input and output size, without untyped ones.
        exposed_seconds: time with at least one of these calls in progress, and without computation.
        hidden_seconds: the same with computation.
        untyped: number of calls whose element type is not in the trace.
    """

    calls: int
    num_bytes: int
    exposed_seconds: float
    hidden_seconds: float
    untyped: int

    @property
    def seconds(self) -> float:
        return self.exposed_seconds + self.hidden_seconds


@dataclass(frozen=True)
class DimensionCommunication:
    """Communication over one dimension, and the same by collective, most bytes first. name: see dimensions.py."""

    name: str
    total: Communication
    collectives: dict[str, Communication]


def by_dimension(
    calls: Sequence[Call], kernels: Sequence[Kernel], computing: Iterable[Interval], steps: Interval
) -> list[DimensionCommunication]:
    """Sum up the calls by dimension and collective, the dimension with the most bytes first.

    Args:
        kernels: NCCL's. If there are any, communication is these, else what the calls and Gloo's transfers take.
        computing: time ranges in which the rank computes, in microseconds of the trace.
        steps: start and end of the recorded steps, likewise.
    """
    made: dict[tuple[str, str], list[Call]] = defaultdict(list)
    spans: dict[tuple[str, str], list[Interval]] = defaultdict(list)
    for call in calls:
        made[call.dimension, call.name].append(call)
        spans[call.dimension, call.name] += () if kernels else call.spans
    for kernel in kernels:
        spans[kernel.dimension, kernel.name].append((kernel.start, kernel.end))
    work = sorted(computing)
    parts: dict[str, dict[str, Communication]] = defaultdict(dict)
    for dimension, name in spans:
        key = dimension, name
        parts[dimension][name] = _communication(made.get(key, []), spans[key], work, steps)
    dimensions = []
    for dimension, by_name in parts.items():
        keys = [(dimension, name) for name in by_name]
        every = [span for key in keys for span in spans[key]]
        total = _communication([call for key in keys for call in made.get(key, [])], every, work, steps)
        ordered = dict(sorted(by_name.items(), key=lambda item: (-item[1].num_bytes, item[0])))
        dimensions.append(DimensionCommunication(dimension, total, ordered))
    return sorted(dimensions, key=lambda communication: (-communication.total.num_bytes, communication.name))


def _communication(
    calls: Sequence[Call], spans: Sequence[Interval], work: Sequence[Interval], steps: Interval
) -> Communication:
    """Sum up some calls. spans: when they communicate. work: when the rank computes."""
    exposed = covered([*spans, *work], *steps) - covered(work, *steps)
    return Communication(
        calls=len(calls),
        num_bytes=sum(call.num_bytes or 0 for call in calls),
        exposed_seconds=exposed * _MICROSECONDS,
        hidden_seconds=(covered(spans, *steps) - exposed) * _MICROSECONDS,
        untyped=sum(call.num_bytes is None for call in calls),
    )
