"""The dimension of the run's mesh over which each collective of a trace runs.

A dimension is named by the ranks that communicate, not by the library that made their process group: "dp", "cp", "tp",
"pp" and "ep" as in the planner's ledger, or several such as "dp x tp". Where only one dimension has more than one rank,
sums over all ranks are thus among its collectives.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, record_function

from samecurve.distributed import flight_recorder
from samecurve.metrics.profiling.waiting import end_of, start_of
from samecurve.strategy.parallel_dims import DIMENSIONS, FSDP, ParallelDims

CALL = "c10d::"
UNKNOWN = "unknown group"
DIMENSION = "dimension"  # the key among an event's arguments
_NAMES = {"dp_replicate": "dp", "dp_shard": "dp"}
_NAME, _RANKS = "Process Group Name", "Process Group Ranks"  # arguments of NCCL's events

Groups = Mapping[str, list[int]]  # the ranks of each process group of this rank, by its name


def joined(dims: ParallelDims, names: Collection[str]) -> str:
    """Name the dimensions among these that have more than one rank, outermost first, e.g. "dp x cp"."""
    spanned = [_NAMES.get(name, name) for name in DIMENSIONS if name in names and getattr(dims, name) > 1]
    return " x ".join(dict.fromkeys(spanned)) or UNKNOWN


def dimension(dims: ParallelDims, ranks: Collection[int], of_experts: bool = False) -> str:
    """Name the dimensions in which global ranks differ.

    Args:
        of_experts: whether the collective is one that sends tokens to experts. This decides where the ranks that share
            the experts are all those of a replica, and then also the ones over which the weights are sharded.
    """
    places = [dims.place(rank) for rank in ranks]
    differing = {name for name in DIMENSIONS if len({place[name] for place in places}) > 1}
    if dims.ep > 1 and len(ranks) == dims.ep and differing <= set(FSDP):
        same_experts = len({dims.index(rank, *FSDP) // dims.ep for rank in ranks}) == 1
        if same_experts and (of_experts or dims.efsdp > 1):
            return "ep"
    return joined(dims, differing)


def attribute(trace: dict) -> list[dict]:
    """Return the events of a trace; those of collectives get the argument `dimension`.

    Args:
        trace: as GroupNotes has completed it. Without its notes, no event gets a dimension.
    """
    events = trace["traceEvents"]
    if NOTES not in trace:
        return events
    notes, info = trace[NOTES], trace.get("distributedInfo", {})
    dims = ParallelDims(**notes["dims"])
    groups = {group["pg_name"]: group["ranks"] for group in info.get("pg_config", ())}
    whole = sorted((e for e in events if e.get("ph") == "X" and "dur" in e), key=start_of)
    calls = [event for event in whole if event["name"].startswith(CALL)]
    starts, ranks_of_calls = [start_of(call) for call in calls], {}
    for time_ns, _, group in notes["calls"]:  # of the flight recorder: a note's time lies within its call
        at = (time_ns - trace.get("baseTimeNanoseconds", 0)) / 1000
        index = bisect_right(starts, at) - 1
        if index >= 0 and at <= end_of(calls[index]) and group in groups:
            ranks_of_calls[index] = groups[group]
    for index, event in _inside([event for event in whole if event["name"] == "record_param_comms"], calls):
        if ranks := _members(event, groups):  # NCCL's process groups describe each call
            ranks_of_calls[index] = ranks
    for event in whole:
        if event["name"].startswith(PEER):  # the range around a message names the other rank
            first, last = bisect_left(starts, start_of(event)), bisect_right(starts, end_of(event))
            index = next((index for index in range(first, last) if calls[index]["tid"] == event["tid"]), None)
            if index is not None:
                ranks_of_calls[index] = [notes["rank"], int(event["name"].removeprefix(PEER))]
    for index, ranks in ranks_of_calls.items():
        calls[index].setdefault("args", {})[DIMENSION] = dimension(dims, ranks, "alltoall" in calls[index]["name"])
    _pass_to_kernels(whole, calls, groups, dims)
    return events


def _members(event: dict, groups: Groups) -> list[int]:
    """Return the ranks of an NCCL event's process group, [] if it names none."""
    arguments = event.get("args", {})
    if arguments.get(_NAME) in groups:
        return groups[arguments[_NAME]]
    listed = arguments.get(_RANKS, "[]")
    return [] if "..." in listed else json.loads(listed)  # torch shortens long lists


def _inside(events: Sequence[dict], calls: Sequence[dict]) -> Iterator[tuple[int, dict]]:
    """Yield (index of its call, event) of each event that its thread reached during a call."""
    by_thread = defaultdict(list)
    for index, call in enumerate(calls):
        by_thread[call["tid"]].append((start_of(call), index))
    for event in events:
        own = by_thread[event["tid"]]
        place = bisect_right(own, (start_of(event), len(calls))) - 1
        if place >= 0 and start_of(event) <= end_of(calls[own[place][1]]):
            yield own[place][1], event


def _pass_to_kernels(events: Sequence[dict], calls: Sequence[dict], groups: Groups, dims: ParallelDims) -> None:
    """Give each NCCL kernel the dimension of its call, and one of several messages at once that of its group."""
    of_id = {}
    for index, event in _inside(events, calls):
        if "External id" in event.get("args", {}):
            of_id[event["args"]["External id"]] = calls[index].get("args", {}).get(DIMENSION)
    for kernel in (event for event in events if event.get("cat") == "kernel"):
        arguments = kernel.setdefault("args", {})
        name = of_id.get(arguments.get("External id"))
        if name is None and (ranks := _members(kernel, groups)):
            name = dimension(dims, ranks, "AllToAll" in kernel["name"])
        if name is not None:
            arguments[DIMENSION] = name


NOTES = "samecurve"  # the key of a trace
PEER = "samecurve: peer rank "
_MESSAGES = ("send", "recv")


class GroupNotes:
    """Notes on the collectives of the recorded steps.

    Traces name neither the group nor the global peer of a message, so that messages are made inside a range that names
    the peer. They all pass through two methods of Python's ProcessGroup, which are replaced between `begin` and `end`.
    """

    def __init__(self, dims: ParallelDims, rank: int):
        self._dims, self._rank = dims, rank
        self._since_ns = 0
        self._replaced: dict[str, Any] = {}

    def begin(self) -> None:
        self._since_ns = time.time_ns()
        if not dist.is_initialized() or self._replaced:
            return
        for name in _MESSAGES:
            self._replaced[name] = vars(dist.ProcessGroup)[name]  # getattr would return a function that does not bind
            setattr(dist.ProcessGroup, name, _with_peer(getattr(dist.ProcessGroup, name)))

    def end(self, profiler: profile) -> None:
        """Store this rank, the mesh and the calls with their groups in the trace. Call while the profiler records."""
        for name, original in self._replaced.items():
            setattr(dist.ProcessGroup, name, original)
        self._replaced = {}
        if dist.is_initialized():
            calls = flight_recorder.gloo_calls(self._since_ns)
            notes = {"rank": self._rank, "dims": asdict(self._dims), "calls": calls}
            profiler.add_metadata_json(NOTES, json.dumps(notes))


def _with_peer(method: Callable) -> Callable:
    @wraps(method)
    def with_peer(group: dist.ProcessGroup, tensors: Any, peer: int, *more: Any) -> Any:
        with record_function(f"{PEER}{dist.get_process_group_ranks(group)[peer]}"):
            return method(group, tensors, peer, *more)

    return with_peer
