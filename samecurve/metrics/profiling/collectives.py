"""The collective operations in a trace: how many, how many bytes each call hands over, and how long they take.

Every one is an operator c10d::..., whatever the backend. Its record has the sizes of its tensors and, but for lists of
tensors, their types; a list's types are those in the record of what the backend did with it.
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
# NCCL's kernels: ncclDevKernel_AllReduce_Sum_f32_RING_LL. Sending and receiving are one.
_KERNEL = re.compile(r"^ncclDev\w*?Kernel_([A-Za-z]+)")
_USUAL_BYTES = 4  # of a type that the trace does not tell: gradients are reduced in fp32


@dataclass(frozen=True)
class Collective:
    """num_bytes: of all calls, of this rank; of each the larger one of what goes in and what comes out.

    seconds: of all calls, those at the same time too: on a device of the kernels, which wait for the other ranks; on a
    CPU from the call to the end of the transfer.
    """

    name: str
    calls: int
    num_bytes: int
    seconds: float


def collectives(events: Iterable[dict]) -> list[Collective]:
    """By name, the largest first. events: complete ones ("ph": "X")."""
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
    """c10d::_allgather_base_ -> all_gather."""
    name = name.removeprefix(_PREFIX).strip("_")
    for form in _FORMS:
        name = name.removesuffix(form)
    return _PLAIN.get(name, name)


def _of_kernels(events: Sequence[dict], send_recv: str) -> dict[str, float]:
    """Seconds by plain name. send_recv: the name for kernels that do both."""
    seconds: dict[str, float] = defaultdict(float)
    for event in events:
        kernel = _KERNEL.match(event["name"]) if event.get("cat") == "kernel" else None
        if kernel:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", kernel[1]).lower()
            seconds[send_recv if name == "send_recv" else name] += float(event["dur"]) * _MICROSECONDS
    return seconds


def _of_transfers(events: Sequence[dict], calls: Sequence[dict]) -> dict[str, float]:
    """Gloo makes each call one transfer, in their order, on a thread that the call waits for or not. By another name:
    its reduce-scatter is an all-reduce."""
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
    found = [0]
    for shape, name in zip(sizes, names, strict=False):
        if name == "TensorList":
            known = types.get(_key(shape))
            name = known.pop(0) if known else ""
            found.append(sum(map(math.prod, shape)) * _BYTES.get(name, _USUAL_BYTES))
        elif _is_tensor(shape, name):
            found.append(math.prod(shape) * _BYTES.get(name, _USUAL_BYTES))
    return max(found)


def _is_tensor(shape: Sequence, name: str) -> bool:
    return bool(shape) and name not in ("", "Scalar", "ScalarList") and not isinstance(shape[0], list)


def _types_of_lists(events: Sequence[dict]) -> dict[str, list[str]]:
    """The element types of lists of tensors of these shapes, in the order in which they were handed over."""
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
