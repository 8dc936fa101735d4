"""The collective operations in a trace: how many, and how many bytes each call hands over.

Every one is an operator c10d::..., whatever the backend. Its record has the sizes of its tensors and, but for lists of
tensors, their types; a list's types are those in the record of what the backend did with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
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
_USUAL_BYTES = 4  # of a type that the trace does not tell: gradients are reduced in fp32


@dataclass(frozen=True)
class Collective:
    """num_bytes: of all calls, of this rank; of each the larger one of what goes in and what comes out."""

    name: str
    calls: int
    num_bytes: int


def collectives(events: Iterable[dict]) -> list[Collective]:
    """By name, the largest first. events: complete ones ("ph": "X")."""
    events = sorted(events, key=lambda event: float(event["ts"]))
    types = _types_of_lists(events)
    found: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith(_PREFIX):
            found[_plain(event["name"])].append(_num_bytes(event.get("args", {}), types))
    made = [Collective(name, len(sizes), sum(sizes)) for name, sizes in found.items()]
    return sorted(made, key=lambda each: (-each.num_bytes, each.name))


def _plain(name: str) -> str:
    """c10d::_allgather_base_ -> all_gather."""
    name = name.removeprefix(_PREFIX).strip("_")
    for form in _FORMS:
        name = name.removesuffix(form)
    return _PLAIN.get(name, name)


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
