"""A trace of PyTorch's profiler (Chrome's trace event format) -> the seconds of each kind of work.

Where the trace has kernels of a device, these are the work, each of the kind of the operator that launched it. On a
CPU it is the operators of the thread that trains: every instant belongs to the innermost one. An instant without work
belongs to communication where some is under way, else to waiting for data, else to nobody, so the kinds add up to the
whole and communication counts only as far as nothing is computed beside it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from samecurve.metrics.profiling.collectives import Collective, collectives
from samecurve.metrics.profiling.op_kinds import KINDS, Work, computes, is_compiled_loss, listed, of_kernel

MICROSECONDS = 1e-6
STEP = "ProfilerStep#"
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# what moves the bytes, beside the training thread: the process group's own ranges, and its kernels
_TRANSFERS = ("gloo:", "mpi:", "ucc:", "xccl:")


class Span(NamedTuple):
    """Microseconds of the trace's clock."""

    start: float
    end: float
    kind: str
    name: str


@dataclass(frozen=True)
class Operator:
    """seconds: without the operators that it calls. kind: that of most of its time."""

    name: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Breakdown:
    """What one rank did in the recorded steps; all numbers are of these steps together.

    seconds: by kind, every name of KINDS; they add up to `total_seconds`. communication_seconds: also while something
    was computed. allocated_bytes: the most that PyTorch held above what it held at the start, by "cpu" and "device".
    """

    steps: tuple[int, ...]
    on_device: bool
    total_seconds: float
    seconds: dict[str, float]
    communication_seconds: float
    operators: list[Operator]
    collectives: list[Collective]
    allocated_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of 1 by kind."""
        return {kind: seconds / self.total_seconds for kind, seconds in self.seconds.items()}


def read_trace(path: Path) -> list[dict]:
    """The events of a trace that was written as gzipped JSON."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return json.load(stream)["traceEvents"]


def breakdown(events: Sequence[dict]) -> Breakdown:
    """events: of one rank, with a range `ProfilerStep#N` for every step. ValueError without one."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in whole if event["name"].startswith(STEP) and event.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError(f"the trace has no {STEP} range, so no step was recorded")
    threads = _by_thread(event for event in whole if event.get("cat") in ("cpu_op", "user_annotation"))
    spans = {thread: list(_innermost(found)) for thread, found in threads.items()}
    main = spans[_thread(steps[0])]
    kernels = [event for event in whole if event.get("cat") in _DEVICE_WORK]
    work = _launched(kernels, threads) if kernels else main
    start, end = _start(steps[0]), max([_end(steps[-1]), *(span.end for span in work if kernels)])
    transfers = [span for span in work if span.kind == "communication"]
    transfers += [Span(_start(e), _end(e), "communication", e["name"]) for e in whole if _transfers(e)]
    computing = [span for span in work if span.kind not in ("communication", "data_wait")]
    waiting = [span for span in main if span.kind == "data_wait"]
    seconds = _shared(start, end, computing, transfers, waiting)
    return Breakdown(
        steps=tuple(int(event["name"].removeprefix(STEP)) for event in steps),
        on_device=bool(kernels),
        total_seconds=(end - start) * MICROSECONDS,
        seconds=seconds,
        communication_seconds=_shared(start, end, [], transfers, [])["communication"],
        operators=_operators(work, kernels or threads[_thread(steps[0])]),
        collectives=collectives(whole),
        allocated_bytes=_allocated(events),
    )


def _thread(event: dict) -> tuple:
    return event["pid"], event["tid"]


def _start(event: dict) -> float:
    return float(event["ts"])


def _end(event: dict) -> float:
    return float(event["ts"]) + float(event["dur"])


def _transfers(event: dict) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith(_TRANSFERS)


def _by_thread(events: Iterable[dict]) -> dict[tuple, list[dict]]:
    """Each thread's events with the caller before the called."""
    threads = defaultdict(list)
    for event in events:
        threads[_thread(event)].append(event)
    for found in threads.values():
        found.sort(key=lambda event: (_start(event), -float(event["dur"])))
    return threads


def _innermost(events: list[dict]) -> Iterator[Span]:
    """One thread's time, cut where the innermost operator changes; what is no work is left out.

    Each event gets the key `work` (a Work or None), which is what kernels that it launched are.
    """
    stack: list[dict] = []
    cursor = 0.0

    def passed(until: float) -> Iterator[Span]:
        nonlocal cursor
        while stack and _end(stack[-1]) <= until:
            yield from reached(_end(stack[-1]))
            stack.pop()
        yield from reached(until)

    def reached(until: float) -> Iterator[Span]:
        nonlocal cursor
        if stack and stack[-1]["work"] and until > cursor:
            yield Span(cursor, until, stack[-1]["work"].kind, stack[-1]["name"])
        cursor = max(cursor, until)

    for event in events:
        yield from passed(_start(event))
        event["work"] = _work(event, stack[-1]["work"] if stack else None)
        stack.append(event)
    yield from passed(float("inf"))


def _work(event: dict, outer: Work | None) -> Work | None:
    if outer is not None and outer.claims:
        return outer
    found = listed(event["name"])
    if found is None and event["cat"] == "cpu_op" and computes(event["name"]):
        found = outer or Work("elementwise")
    return found


def _launched(kernels: list[dict], threads: dict[tuple, list[dict]]) -> list[Span]:
    """The device's work. An operator and the kernels that it launched have the same External id."""
    operators = {e["args"].get("External id"): e for found in threads.values() for e in found if e["cat"] == "cpu_op"}
    spans = []
    for kernel in kernels:
        caller = operators.get(kernel.get("args", {}).get("External id"))
        work = of_kernel(kernel["name"])
        known = work.kind == "communication" or is_compiled_loss(kernel["name"])
        if not known and caller is not None and caller["work"]:
            work = caller["work"]
        name = caller["name"] if caller is not None else kernel["name"]
        spans.append(Span(_start(kernel), _end(kernel), work.kind, name))
    return spans


def _shared(start: float, end: float, *layers: Iterable[Span]) -> dict[str, float]:
    """Seconds by kind between start and end. Where spans of several layers overlap, the first layer's count."""
    changes = [(start, 0, "", 0), (end, 0, "", 0)]
    for layer, spans in enumerate(layers):
        for span in spans:
            if span.end > start and span.start < end:
                changes.append((max(span.start, start), layer, span.kind, 1))
                changes.append((min(span.end, end), layer, span.kind, -1))
    changes.sort(key=lambda change: change[0])
    active = [Counter() for _ in layers]
    seconds = dict.fromkeys(KINDS, 0.0)
    for (at, layer, kind, change), following in pairwise(changes):
        if change:
            active[layer][kind] += change
        running = (name for counts in active for name, count in counts.items() if count > 0)
        seconds[next(running, "idle")] += (following[0] - at) * MICROSECONDS
    return seconds


def _operators(work: Iterable[Span], called: Iterable[dict]) -> list[Operator]:
    """The longest first."""
    seconds: dict[str, Counter] = defaultdict(Counter)
    for span in work:
        seconds[span.name][span.kind] += (span.end - span.start) * MICROSECONDS
    calls = Counter(event["name"] for event in called)
    if not calls.keys() & seconds.keys():  # kernels: named by the operator that launched them
        calls = Counter(span.name for span in work)
    found = [
        Operator(name, kinds.most_common(1)[0][0], calls[name], sum(kinds.values())) for name, kinds in seconds.items()
    ]
    return sorted(found, key=lambda operator: -operator.seconds)


def _allocated(events: Iterable[dict]) -> dict[str, int]:
    changes = [event for event in events if event.get("name") == "[memory]"]
    held, most = Counter(), Counter()
    for event in sorted(changes, key=_start):
        where = "cpu" if event["args"]["Device Type"] == 0 else "device"
        held[where] += int(event["args"]["Bytes"])
        most[where] = max(most[where], held[where])
    return dict(most)
