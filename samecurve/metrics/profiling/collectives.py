"""Collective operations in a profiler trace: number of calls, bytes per call, and duration.

Every collective is an operator c10d::..., for all backends. Its event has the shapes of its tensors and, except for
lists of tensors, their types. The types of a list are in the event of the backend's own operation.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from samecurve.metrics.profiling.dimensions import CALL, DIMENSION, UNKNOWN
from samecurve.metrics.profiling.waiting import MICROSECONDS, Interval, covered, end_of, start_of

_TRANSFER = "gloo:"
_PLAIN = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_FORMS = ("_coalesced", "_base", "_into_tensor", "_tensor")  # from the end, as in _allgather_into_tensor_coalesced_
# names of types as in the events of operators and, in lower case, of record_param_comms
_BYTES = {
    **dict.fromkeys(("double", "long int", "long"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "bfloat16", "half", "short"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "byte", "char"), 1),
}
# NCCL's kernels, for example ncclDevKernel_AllReduce_Sum_f32_RING_LL. Send and receive share one kernel.
_KERNEL = re.compile(r"^ncclDev\w*?Kernel_([A-Za-z]+)")
_RUN_AS = {"reduce_scatter": "all_reduce"}  # by Gloo


@dataclass(frozen=True)
class CollectiveCalls:
    """All calls of one collective on this rank.

    Attributes:
        calls: number of calls.
        num_bytes: sum over the calls of the larger of input and output size, without untyped ones.
        seconds: sum over the calls, overlapping ones included. On a GPU the time of the kernels, which includes waiting
            for other ranks; on a CPU the time from the call to the end of the transfer.
        untyped: number of calls whose element type is not in the trace.
    """

    name: str
    calls: int
    num_bytes: int
    seconds: float
    untyped: int = 0


@dataclass(frozen=True)
class Call:
    """One call of a collective.

    Attributes:
        dimension: over which it runs, see dimensions.py.
        num_bytes: the larger of input and output size; None if the trace names no element type.
        spans: (start, end) of the operator and of Gloo's transfer, in microseconds of the trace.
    """

    name: str
    dimension: str
    num_bytes: int | None
    spans: tuple[tuple[float, float], ...]


class Kernel(NamedTuple):
    """A kernel of NCCL; start and end in microseconds of the trace."""

    name: str
    dimension: str
    start: float
    end: float


def made_calls(events: Iterable[dict]) -> list[Call]:
    """List the calls of collectives in the order of their start. events: complete events of a trace ("ph": "X")."""
    events = sorted(events, key=start_of)
    calls = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith(CALL)]
    made = []
    rows = zip(calls, _types_of_lists(events, calls), _transfers(events, calls), strict=True)
    for call, type_of_list, transfer in rows:
        arguments = call.get("args", {})
        tensors = [(n, _BYTES.get(type_of_list if name == "TensorList" else name)) for n, name in _tensors(arguments)]
        is_typed = all(width for _, width in tensors)
        num_bytes = max((n * (width or 0) for n, width in tensors), default=0) if is_typed else None
        spans = tuple((start_of(event), end_of(event)) for event in (call, transfer) if event)
        made.append(Call(_plain(call["name"]), arguments.get(DIMENSION, UNKNOWN), num_bytes, spans))
    return made


def kernels(events: Iterable[dict], calls: Iterable[Call]) -> list[Kernel]:
    """List NCCL's kernels. calls: tell which of sending and receiving, for which kernels have one name, it is."""
    messages = "send" if any(call.name == "send" for call in calls) else "recv"
    kernels_by_start = []
    for event in events:
        kernel = _KERNEL.match(event["name"]) if event.get("cat") == "kernel" else None
        if kernel:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", kernel[1]).lower()
            where = event.get("args", {}).get(DIMENSION, UNKNOWN)
            name = messages if name == "send_recv" else name
            kernels_by_start.append(Kernel(name, where, start_of(event), end_of(event)))
    return kernels_by_start


def by_name(calls: Sequence[Call], kernels: Sequence[Kernel]) -> list[CollectiveCalls]:
    """Sum up the calls by name, most bytes first."""
    sizes: dict[str, list[int | None]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for call in calls:
        sizes[call.name].append(call.num_bytes)
        if not kernels:
            seconds[call.name] += (max(end for _, end in call.spans) - call.spans[0][0]) * MICROSECONDS
    for kernel in kernels:
        seconds[kernel.name] += (kernel.end - kernel.start) * MICROSECONDS
    made = [
        CollectiveCalls(name, len(own), sum(filter(None, own)), seconds.get(name, 0.0), own.count(None))
        for name, own in sizes.items()
    ]
    return sorted(made, key=lambda collective: (-collective.num_bytes, collective.name))


def _plain(name: str) -> str:
    """Normalize an operator's name: c10d::_allgather_base_ -> all_gather."""
    name = name.removeprefix(CALL).strip("_")
    for form in _FORMS:
        name = name.removesuffix(form)
    return _PLAIN.get(name, name)


def _transfers(events: Sequence[dict], calls: Sequence[dict]) -> list[dict | None]:
    """Find the Gloo transfer of each call, if any.

    Gloo makes one transfer per call on a thread of the process group, synchronously or not. Groups run side by side, so
    that a call has the first transfer of its name that starts after it. Gloo's reduce-scatter is an all-reduce.
    """
    waiting = deque(event for event in events if event["name"].startswith(_TRANSFER))
    transfers: list[dict | None] = []
    for call in calls:
        # these belong to calls before the recording
        while waiting and start_of(waiting[0]) < start_of(call):
            waiting.popleft()
        name = _plain(call["name"])
        names = {_TRANSFER + name, _TRANSFER + _RUN_AS.get(name, name)}
        transfer = next((event for event in waiting if event["name"] in names), None)
        if transfer:
            waiting.remove(transfer)
        transfers.append(transfer)
    return transfers


def _tensors(arguments: dict) -> Iterator[tuple[int, str]]:
    """Yield (number of elements, type) of each tensor and list of tensors among an operator's inputs."""
    for shape, name in zip(arguments.get("Input Dims", []), arguments.get("Input type", []), strict=False):
        if name == "TensorList":
            yield sum(map(math.prod, shape)), name
        elif shape and name not in ("", "Scalar", "ScalarList") and not isinstance(shape[0], list):
            yield math.prod(shape), name


def _types_of_lists(events: Sequence[dict], calls: Sequence[dict]) -> list[str]:
    """Return the element type of each call's lists of tensors, "" if unknown, from the backend's own operations.

    Process groups run side by side, so that an operation belongs to the first call with its name and size.
    """
    operations: dict[tuple[str, int], deque[str]] = defaultdict(deque)
    for event in events:
        arguments = event.get("args", {})
        if event["name"].startswith(_TRANSFER) and arguments.get("Input type"):
            elements = sum(map(math.prod, arguments["Input Dims"]))
            operations[event["name"].removeprefix(_TRANSFER), elements].append(arguments["Input type"][0])
        elif event["name"] == "record_param_comms" and "dtype" in arguments:
            name = _plain(arguments.get("Collective name", ""))
            operations[name, arguments.get("In msg nelems", 0)].append(arguments["dtype"].lower())
    types = []
    for call in calls:
        name, sizes = _plain(call["name"]), [elements for elements, _ in _tensors(call.get("args", {}))]
        keys = [*((name, size) for size in sizes), (_RUN_AS.get(name, name), max(sizes, default=0))]
        types.append(next((operations[key].popleft() for key in keys if operations[key]), ""))
    return types


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

    Communication is hidden while the rank computes, and exposed otherwise. Different dimensions may communicate at the
    same time, so that their times may add up to more than that of all communication.

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
        exposed_seconds=exposed * MICROSECONDS,
        hidden_seconds=(covered(spans, *steps) - exposed) * MICROSECONDS,
        untyped=sum(call.num_bytes is None for call in calls),
    )
