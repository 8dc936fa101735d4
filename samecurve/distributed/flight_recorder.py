"""PyTorch's flight recorder: the process group of each Gloo collective of this process.

Profiler traces name the group of NCCL's collectives, but not that of Gloo's (torch 2.13).
"""

from __future__ import annotations

import json
import os
import threading
from typing import NamedTuple

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the older name
_NUM_CALLS = "20000"  # of which the last are kept; about a kilobyte each


class GroupCall(NamedTuple):
    """One collective. time_ns: Unix time within the call. operation: e.g. gloo:all_reduce. group: name of a group."""

    time_ns: int
    operation: str
    group: str


def enable() -> None:
    """Let the recorder keep calls, unless the user has set their number. It reads the variable at the first call."""
    if not any(name in os.environ for name in _SIZES):
        os.environ[_SIZES[0]] = _NUM_CALLS


def gloo_calls(since_ns: int) -> list[GroupCall]:
    """List the collectives that this thread started since a Unix time; none if the recorder is off.

    Send and receive are not recorded by Gloo.
    """
    from torch._C import _distributed_c10d

    dump = _distributed_c10d._dump_fr_trace_json  # pyright: ignore[reportAttributeAccessIssue]
    entries = json.loads(dump()).get("entries", [])
    thread = str(threading.get_ident())
    return [
        GroupCall(entry["time_created_ns"], entry["profiling_name"], entry["process_group"][0])
        for entry in entries
        if entry["thread_id"] == thread and entry["time_created_ns"] >= since_ns
    ]
