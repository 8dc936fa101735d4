"""Process groups of the collectives, noted while steps are recorded: a trace alone cannot tell the dimensions."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, record_function

from samecurve.distributed import flight_recorder
from samecurve.strategy.parallel_dims import ParallelDims

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
