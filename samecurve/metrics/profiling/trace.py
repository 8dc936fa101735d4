"""Time breakdown of a PyTorch profiler trace (Chrome's trace event format): seconds by kind of work.

If the trace has device kernels, these are the work; each has the kind of the operator that launched it. On a CPU, the
work is the operators of the training thread, and every instant belongs to the innermost operator. An instant without
work counts as communication if any is in progress, else as waiting for data, else as idle. The kinds therefore add up
to the total time, and communication counts only where computation does not overlap it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from samecurve.data.batches import DATA_WAIT
from samecurve.losses.cross_entropy import LOSS
from samecurve.metrics.profiling.collectives import (
    CollectiveCalls,
    DimensionCommunication,
    by_dimension,
    by_name,
    kernels,
    made_calls,
)
from samecurve.metrics.profiling.dimensions import attribute
from samecurve.metrics.profiling.waiting import MICROSECONDS, Waiting, end_of, start_of, waiting

STEP = "ProfilerStep#"
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# Transfers outside the training thread: the process group's own ranges.
_TRANSFERS = ("gloo:", "mpi:", "ucc:", "xccl:")


class Span(NamedTuple):
    """A time range of one kind of work, in microseconds of the trace's clock."""

    start: float
    end: float
    kind: str
    name: str


@dataclass(frozen=True)
class Operator:
    """All calls of one operator. seconds: excluding the operators that it calls. kind: that of most of its time."""

    name: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Breakdown:
    """Time breakdown of one rank; all numbers are totals over the recorded steps.

    Attributes:
        steps: the recorded steps.
        on_device: whether the work is that of GPU kernels.
        seconds: by kind, with every key of KINDS; they add up to `total_seconds`.
        communication_seconds: includes communication that overlaps computation.
        operators: the longest first.
        collectives: those with the most bytes first.
        dimensions: communication by dimension of the mesh, that with the most bytes first.
        allocated_bytes: peak of PyTorch's allocations above the level at the start, for "cpu" and "device".
        waiting: of a rank within a schedule; None without one.
    """

    steps: tuple[int, ...]
    on_device: bool
    total_seconds: float
    seconds: dict[str, float]
    communication_seconds: float
    operators: list[Operator]
    collectives: list[CollectiveCalls]
    dimensions: list[DimensionCommunication] = field(default_factory=list)
    allocated_bytes: dict[str, int] = field(default_factory=dict)
    waiting: Waiting | None = None

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of 1 by kind."""
        return {kind: seconds / self.total_seconds for kind, seconds in self.seconds.items()}


def read_trace(path: Path) -> list[dict]:
    """Read the events of a trace stored as gzipped JSON; those of collectives get their `dimension` as an argument."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return attribute(json.load(stream))


def breakdown(events: Sequence[dict]) -> Breakdown:
    """Compute the breakdown of one rank's events.

    Raises ValueError if there is no range `ProfilerStep#N`, which each recorded step must have.
    """
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in whole if event["name"].startswith(STEP) and event.get("cat") == "user_annotation"]
    if not steps:
        raise ValueError(f"the trace has no {STEP} range, so no step was recorded")
    threads: dict[tuple, list[dict]] = defaultdict(list)
    for event in whole:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads[_thread(event)].append(event)
    for nested in threads.values():  # callers before callees
        nested.sort(key=lambda event: (start_of(event), -float(event["dur"])))
    spans = {thread: list(_innermost(nested)) for thread, nested in threads.items()}
    main = spans[_thread(steps[0])]
    launched = [event for event in whole if event.get("cat") in _DEVICE_WORK]
    work = _launched(launched, threads) if launched else main
    # kernels of the last step may run after the range in which they were launched
    start, end = start_of(steps[0]), max([end_of(steps[-1]), *(span.end for span in work if launched)])
    transfers = [span for span in work if span.kind == "communication"]
    notes = [e for e in whole if e.get("cat") == "user_annotation" and e["name"].startswith(_TRANSFERS)]
    transfers += [Span(start_of(e), end_of(e), "communication", e["name"]) for e in notes]
    computing = [span for span in work if span.kind not in ("communication", "data_wait")]
    without_rows = [span for span in main if span.kind == "data_wait"]
    seconds = _shared(start, end, computing, transfers, without_rows)
    calls, busy = made_calls(whole), [(span.start, span.end) for span in computing]
    of_nccl = kernels(whole, calls)
    return Breakdown(
        steps=tuple(int(event["name"].removeprefix(STEP)) for event in steps),
        on_device=bool(launched),
        total_seconds=(end - start) * MICROSECONDS,
        seconds=seconds,
        communication_seconds=_shared(start, end, [], transfers, [])["communication"],
        operators=_operators(work, launched or threads[_thread(steps[0])]),
        collectives=by_name(calls, of_nccl),
        dimensions=by_dimension(calls, of_nccl, busy, (start, end)),
        allocated_bytes=_allocated(events),
        waiting=waiting(whole, busy, bool(launched)),
    )


def _thread(event: dict) -> tuple:
    return event["pid"], event["tid"]


def _innermost(events: list[dict]) -> Iterator[Span]:
    """Split one thread's time where the innermost operator changes; time without work is left out.

    Each event gets the key `work` (an OperatorClass or None), the classification of the kernels that it launched.
    """
    stack: list[dict] = []
    cursor = 0.0

    def passed(until: float) -> Iterator[Span]:
        nonlocal cursor
        while stack and end_of(stack[-1]) <= until:
            yield from reached(end_of(stack[-1]))
            stack.pop()
        yield from reached(until)

    def reached(until: float) -> Iterator[Span]:
        nonlocal cursor
        if stack and stack[-1]["work"] and until > cursor:
            yield Span(cursor, until, stack[-1]["work"].kind, stack[-1]["name"])
        cursor = max(cursor, until)

    for event in events:
        yield from passed(start_of(event))
        outer = stack[-1]["work"] if stack else None
        event["work"] = outer if outer is not None and outer.claims else listed(event["name"])
        if event["work"] is None and event["cat"] == "cpu_op" and _COMPUTES.search(event["name"]):
            event["work"] = outer or OperatorClass("elementwise")
        stack.append(event)
    yield from passed(float("inf"))


def _launched(kernels: list[dict], threads: dict[tuple, list[dict]]) -> list[Span]:
    """List the device's work. An operator and the kernels that it launched share an External id."""
    operators = {e["args"].get("External id"): e for nested in threads.values() for e in nested if e["cat"] == "cpu_op"}
    spans = []
    for kernel in kernels:
        caller = operators.get(kernel.get("args", {}).get("External id"))
        work = of_kernel(kernel["name"])
        # of these, the kernel's name says more than the operator that launched it
        known = work.kind == "communication" or _COMPILED_LOSS.search(kernel["name"])
        if not known and caller is not None and caller["work"]:
            work = caller["work"]
        name = caller["name"] if caller is not None else kernel["name"]
        spans.append(Span(start_of(kernel), end_of(kernel), work.kind, name))
    return spans


def _shared(start: float, end: float, *layers: Iterable[Span]) -> dict[str, float]:
    """Sum the seconds by kind between start and end. Where spans of several layers overlap, the first layer counts."""
    # two entries that change nothing, so that time without a span is counted up to both ends
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
    """Sum the spans by operator, the longest first."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in work:
        seconds[span.name][span.kind] += (span.end - span.start) * MICROSECONDS
    calls = Counter(event["name"] for event in called)
    if not calls.keys() & seconds.keys():  # kernel spans are named after the operators that launched them
        calls = Counter(span.name for span in work)
    operators = [
        Operator(name, max(kinds, key=kinds.__getitem__), calls[name], sum(kinds.values()))
        for name, kinds in seconds.items()
    ]
    return sorted(operators, key=lambda operator: -operator.seconds)


def _allocated(events: Iterable[dict]) -> dict[str, int]:
    changes = [event for event in events if event.get("name") == "[memory]"]
    held, most = Counter(), Counter()
    for event in sorted(changes, key=start_of):
        where = "cpu" if event["args"]["Device Type"] == 0 else "device"  # c10::DeviceType
        held[where] += int(event["args"]["Bytes"])
        most[where] = max(most[where], held[where])
    return dict(most)


KINDS = {
    "matmul": "matrix multiplications",
    "attention": "attention",
    "loss": "the loss, from the logits on",
    "optimizer": "gradient norm and optimizer",
    "copies": "copies, casts, look-ups",
    "elementwise": "norms and other element by element",
    "communication": "waiting for communication",
    "data_wait": "waiting for data",
    "idle": "none of these: Python, launches, waiting",
}


@dataclass(frozen=True)
class OperatorClass:
    """Classification of an operator. kind: a key of KINDS. claims: operators called inside count as the same kind."""

    kind: str
    claims: bool = False


# The first match counts. Fused attention and loss operators claim their matrix multiplications and copies. Eager
# attention consists of plain operators, of which only the softmax can be told from the rest of the model.
_OPERATORS = (
    (rf"^{DATA_WAIT}$", OperatorClass("data_wait", claims=True)),
    (rf"^{LOSS}$", OperatorClass("loss", claims=True)),
    (r"^Optimizer\.step#", OperatorClass("optimizer", claims=True)),
    (r"^c10d::", OperatorClass("communication", claims=True)),
    (
        r"^\w+::.*(scaled_dot_product|(flash|flex|varlen)_att)",
        OperatorClass("attention", claims=True),
    ),
    (r"^\w+::.*(cross_entropy|log_softmax|nll_loss|kl_div|logsumexp)", OperatorClass("loss", claims=True)),
    (r"^aten::_?(safe_)?softmax", OperatorClass("attention")),
    (r"^aten::(linalg_vector_norm|_foreach_|_fused_(adam|sgd|adagrad)|_amp_)", OperatorClass("optimizer")),
    (r"^aten::(linear|linear_backward|matmul|mm|bmm|addmm|addbmm|baddbmm|mv|dot|einsum)$", OperatorClass("matmul")),
    (r"^aten::_(scaled|grouped|int)_\w*mm$|^(mkldnn|mkl|onednn)::.*(linear|matmul)", OperatorClass("matmul")),
    (r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|zero_|zeros|fill_|full)$", OperatorClass("copies")),
    (r"^aten::(embedding\w*|index\w*|gather|scatter\w*|_local_scalar_dense|item)$", OperatorClass("copies")),
    (r"ddp\.reducer::copy_", OperatorClass("copies")),
    (r"^(CompiledFunction|Torch-Compiled Region|## Call CompiledFxGraph)", OperatorClass("elementwise")),
)

# Kernels without an operator in the trace (from Triton or another library), matched by kernel name.
_KERNELS = (
    (r"(?i)nccl|rccl", OperatorClass("communication")),
    (r"(?i)flash|fmha|attention|attn", OperatorClass("attention")),
    (r"(?i)cross_entropy|softmax|nll", OperatorClass("loss")),
    (r"(?i)multi_tensor|adam|lion|optimi[sz]er", OperatorClass("optimizer")),
    (r"(?i)gemm|cutlass|cublas|xmma|nvjet|matmul|_mm_", OperatorClass("matmul")),
    (r"(?i)memcpy|memset|copy|cast|catarray|index|gather|embedding", OperatorClass("copies")),
)
# Kernels fused by torch.compile contain the names of their operators; the caller is a whole graph.
_COMPILED_LOSS = re.compile(r"^triton_.*(cross_entropy|log_softmax|nll_loss)")
# Operators that compute: all names with a namespace, except autograd's nodes, which only call others. Their kind is
# `elementwise`, unless they or an operator around them is listed.
_COMPUTES = re.compile(r"^(?!autograd::|torch::autograd::)\w+::")


@lru_cache(maxsize=4096)
def listed(name: str) -> OperatorClass | None:
    """Look up an operator or range of the CPU part of a trace; None if the table has no entry."""
    return next((work for pattern, work in _OPERATORS if re.search(pattern, name)), None)


@lru_cache(maxsize=4096)
def of_kernel(name: str) -> OperatorClass:
    """Classify a GPU kernel by its name alone."""
    return next((work for pattern, work in _KERNELS if re.search(pattern, name)), OperatorClass("elementwise"))
