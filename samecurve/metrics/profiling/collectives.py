"""Collective operations in a profiler trace: number of calls, bytes per call, and duration.

Every collective is an operator c10d::..., for all backends. Its event has the shapes of its tensors and, except for
lists of tensors, their types. The types of a list are in the event of the backend's own operation.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PREFIX = "c10d::"
_PLAIN = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_FORMS = ("_into_tensor", "_tensor", "_coalesced", "_base")
_BYTES = {
    **dict.fromkeys(("double", "long int", "long"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "bfloat16", "half", "short"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "byte", "char"), 1),
}
_MICROSECONDS = 1e-6
# NCCL's kernels, for example ncclDevKernel_AllReduce_Sum_f32_RING_LL. Send and receive share one kernel.
_KERNEL = re.compile(r"^ncclDev\w*?Kernel_([A-Za-z]+)")
_USUAL_BYTES = 4  # for a type that is not in the trace: gradients are reduced in fp32


@dataclass(frozen=True)
class Collective:
    """All calls of one collective on this rank.

    Attributes:
        calls: number of calls.
        num_bytes: sum over the calls of the larger of input and output size.
        seconds: sum over the calls, overlapping ones included. On a GPU the time of the kernels, which includes waiting
            for other ranks; on a CPU the time from the call to the end of the transfer.
    """

    name: str
    calls: int
    num_bytes: int
    seconds: float


def collectives(events: Iterable[dict]) -> list[Collective]:
    """Sum up the collectives by name, most bytes first. events: complete events of a trace ("ph": "X")."""
    events = sorted(events, key=lambda event: float(event["ts"]))
    types = _types_of_lists(events)
    calls = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith(_PREFIX)]
    found: dict[str, list[int]] = defaultdict(list)
    for event in calls:
        found[_plain(event["name"])].append(_num_bytes(event.get("args", {}), types))
    seconds = _of_kernels(events, "send" if "send" in found else "recv") or _of_transfers(events, calls)
    made = [Collective(name, len(sizes), sum(sizes), seconds.get(name, 0.0)) for name, sizes in found.items()]
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
        while transfers and float(transfers[0]["ts"]) < start:
            transfers.popleft()
        if transfers:
            transfer = transfers.popleft()
            end = max(end, float(transfer["ts"]) + float(transfer["dur"]))
        seconds[_plain(call["name"])] += (end - start) * _MICROSECONDS
    return seconds


def _num_bytes(arguments: dict, types: dict[str, list[str]]) -> int:
    sizes, names = arguments.get("Input Dims", []), arguments.get("Input type", [])
    sizes_in_bytes = [0]
    for shape, name in zip(sizes, names, strict=False):
        if name == "TensorList":
            known = types.get(_key(shape))
            name = known.pop(0) if known else ""
            sizes_in_bytes.append(sum(map(math.prod, shape)) * _BYTES.get(name, _USUAL_BYTES))
        elif _is_tensor(shape, name):
            sizes_in_bytes.append(math.prod(shape) * _BYTES.get(name, _USUAL_BYTES))
    return max(sizes_in_bytes)


def _is_tensor(shape: Sequence, name: str) -> bool:
    return bool(shape) and name not in ("", "Scalar", "ScalarList") and not isinstance(shape[0], list)


def _types_of_lists(events: Sequence[dict]) -> dict[str, list[str]]:
    """Map the shapes of each list of tensors to its element types, in call order."""
    types: dict[str, list[str]] = defaultdict(list)
    for event in events:
        arguments = event.get("args", {})
        if event["name"].startswith("gloo:") and arguments.get("Input type"):
            types[_key(arguments["Input Dims"])].append(arguments["Input type"][0])
        elif event["name"] == "record_param_comms" and "dtype" in arguments:
            types[_key([[arguments.get("In msg nelems", 0)]])].append(arguments["dtype"].lower())
    return types


def _key(shapes: object) -> str:
    return str(shapes)
