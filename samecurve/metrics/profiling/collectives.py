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

_PREFIX = "c10d::"
_PLAIN = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_FORMS = ("_coalesced", "_base", "_into_tensor", "_tensor")  # from the end, as in _allgather_into_tensor_coalesced_
# names of types as in the events of operators and, in lower case, of record_param_comms
_BYTES = {
    **dict.fromkeys(("double", "long int", "long"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "bfloat16", "half", "short"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "byte", "char"), 1),
}
_MICROSECONDS = 1e-6
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


def collectives(events: Iterable[dict]) -> list[CollectiveCalls]:
    """Sum up the collectives by name, most bytes first. events: complete events of a trace ("ph": "X")."""
    events = sorted(events, key=lambda event: float(event["ts"]))
    calls = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith(_PREFIX)]
    found: dict[str, list[int | None]] = defaultdict(list)
    for event, element_type in zip(calls, _types_of_lists(events, calls), strict=True):
        found[_plain(event["name"])].append(_num_bytes(event.get("args", {}), element_type))
    seconds = _of_kernels(events, "send" if "send" in found else "recv") or _of_transfers(events, calls)
    made = [
        CollectiveCalls(name, len(sizes), sum(filter(None, sizes)), seconds.get(name, 0.0), sizes.count(None))
        for name, sizes in found.items()
    ]
    return sorted(made, key=lambda each: (-each.num_bytes, each.name))


def _plain(name: str) -> str:
    """Normalize an operator's name: c10d::_allgather_base_ -> all_gather."""
    name = name.removeprefix(_PREFIX).strip("_")
    for form in _FORMS:
        name = name.removesuffix(form)
    return _PLAIN.get(name, name)


def _of_kernels(events: Sequence[dict], send_recv: str) -> dict[str, float]:
    """Sum the seconds of NCCL kernels by collective. send_recv: the name for kernels that send and receive."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        kernel = _KERNEL.match(event["name"]) if event.get("cat") == "kernel" else None
        if kernel:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", kernel[1]).lower()
            seconds[send_recv if name == "send_recv" else name] += float(event["dur"]) * _MICROSECONDS
    return seconds


def _of_transfers(events: Sequence[dict], calls: Sequence[dict]) -> dict[str, float]:
    """Sum the seconds of Gloo transfers by collective.

    Gloo makes one transfer per call, in the same order, on another thread, synchronously or not. Names do not match:
    its reduce-scatter is an all-reduce.
    """
    transfers = deque(event for event in events if event["name"].startswith("gloo:"))
    seconds: dict[str, float] = defaultdict(float)
    for call in calls:
        start, end = float(call["ts"]), float(call["ts"]) + float(call["dur"])
        # these belong to calls before the recording
        while transfers and float(transfers[0]["ts"]) < start:
            transfers.popleft()
        if transfers:
            transfer = transfers.popleft()
            end = max(end, float(transfer["ts"]) + float(transfer["dur"]))
        seconds[_plain(call["name"])] += (end - start) * _MICROSECONDS
    return seconds


def _num_bytes(arguments: dict, type_of_list: str) -> int | None:
    """Return the larger of input and output size; None if a type is unknown."""
    sizes = [0]
    for elements, name in _tensors(arguments):
        width = _BYTES.get(type_of_list if name == "TensorList" else name)
        if width is None:
            return None
        sizes.append(elements * width)
    return max(sizes)


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
        if event["name"].startswith("gloo:") and arguments.get("Input type"):
            elements = sum(map(math.prod, arguments["Input Dims"]))
            operations[event["name"].removeprefix("gloo:"), elements].append(arguments["Input type"][0])
        elif event["name"] == "record_param_comms" and "dtype" in arguments:
            name = _plain(arguments.get("Collective name", ""))
            operations[name, arguments.get("In msg nelems", 0)].append(arguments["dtype"].lower())
    types = []
    for call in calls:
        name, sizes = _plain(call["name"]), [elements for elements, _ in _tensors(call.get("args", {}))]
        keys = [*((name, size) for size in sizes), (_RUN_AS.get(name, name), max(sizes, default=0))]
        types.append(next((operations[key].popleft() for key in keys if operations[key]), ""))
    return types
