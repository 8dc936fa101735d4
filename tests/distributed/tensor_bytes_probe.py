"""Run under a launcher with train.py's arguments: a training in which the bytes of all tensors in one step are counted.

Rank 0 prints one JSON line for each of STEPS: `kept`, the storages that live before the step, and `peak`, those at its
largest moment. What the C++ threads of gloo allocate is not in it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_tensors import live_bytes
from torch.profiler import ProfilerActivity, profile

import train
from samecurve.run import lifecycle

STEPS = 3, 4, 5, 6, 7  # optimizers have their states then


def most_allocated(recorded: profile) -> int:
    """The largest sum of allocations and frees since the recording began.

    Threads of gloo free some blocks out of the profiler's sight: a block is gone where a new one has its addresses.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Addr"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    most = now = 0
    blocks: dict[int, int] = {}  # bytes by address
    for _, address, change in changes:
        if change < 0:
            blocks.pop(address, None)
        else:
            gone = [each for each, size in blocks.items() if each < address + change and address < each + size]
            now -= sum(blocks.pop(each) for each in gone)
            blocks[address] = change
        now += change
        most = max(most, now)
    return most


def counted(loop: Callable[[Any], None]) -> Callable[[Any], None]:
    def train_loop(session: Any) -> None:
        step, steps = session.engine.step, []

        def watched_step(*arguments: Any) -> Any:
            steps.append(None)
            if len(steps) not in STEPS:
                return step(*arguments)
            kept = live_bytes()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                result = step(*arguments)
            if os.environ.get("RANK", "0") == "0":  # lines of several ranks may run into each other
                print("BYTES " + json.dumps({"kept": kept, "peak": kept + most_allocated(recorded)}), flush=True)
            return result

        session.engine.step = watched_step
        loop(session)

    return train_loop


if __name__ == "__main__":
    train.train = counted(train.train)
    lifecycle.end_with(train.main)
