"""Summary of a profile: as a page of text, as JSON, and as two lines for the console."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from samecurve.metrics.profiling.collectives import Communication
from samecurve.metrics.profiling.trace import KINDS, Breakdown
from samecurve.metrics.profiling.waiting import Waiting
from samecurve.storage.terminal import aligned

if TYPE_CHECKING:
    from samecurve.interfaces.engine import MemoryUsage

NUM_OPERATORS = 15
_MIB = 2**20
_PASSES = {"F": "forward passes", "B": "backward passes", "I": "inputs' gradients", "W": "weights' gradients"}
_MEMORY = {
    "weights": "weights and buffers",
    "optimizer": "optimizer: moments, masters",
    "gradients": "gradients (by formula)",
    "activations": "activations, buckets and the rest",
}


def summary_values(breakdown: Breakdown, held: MemoryUsage, rank: int) -> dict:
    """Return the numbers of the page for other programs. Seconds and calls are totals over all recorded steps.

    Args:
        held: bytes of weights, gradients and optimizer states on this rank.
    """
    return {
        "steps": list(breakdown.steps),
        "rank": rank,
        "on_device": breakdown.on_device,
        "seconds": breakdown.total_seconds,
        "seconds_by_kind": breakdown.seconds,
        "shares": breakdown.shares,
        "communication_seconds": breakdown.communication_seconds,
        "memory_bytes": memory(breakdown, held),
        "allocated_bytes": breakdown.allocated_bytes,
        "collectives": [asdict(collective) for collective in breakdown.collectives],
        "dimensions": [
            {"name": dimension.name}
            | asdict(dimension.total)
            | {"collectives": [{"name": name} | asdict(part) for name, part in dimension.collectives.items()]}
            for dimension in breakdown.dimensions
        ],
        "waiting": asdict(waiting) | {"idle": waiting.idle} if (waiting := breakdown.waiting) else None,
        "operators": [asdict(operator) for operator in breakdown.operators[:NUM_OPERATORS]],
    }


def summary_lines(breakdown: Breakdown) -> Iterator[str]:
    """Yield the lines for the console."""
    shares = sorted(breakdown.shares.items(), key=lambda item: -item[1])
    # smaller shares would be shown as 0%
    listed = ", ".join(f"{kind.replace('_', ' ')} {share:.0%}" for kind, share in shares if share >= 0.005)
    yield f"profile of {_steps(breakdown)}: {listed}"
    handed = sum(collective.num_bytes for collective in breakdown.collectives) / len(breakdown.steps)
    calls = sum(collective.calls for collective in breakdown.collectives) / len(breakdown.steps)
    if waiting := breakdown.waiting:
        measured, expected = f"{waiting.idle:.1%} on this rank", f"{waiting.predicted_idle:.1%} by the schedule"
        yield f"{waiting.schedule}: waiting {measured}, {expected}"
    if calls:
        ms = 1000 * breakdown.communication_seconds / len(breakdown.steps)
        yield f"collectives per step: {calls:,.0f} with {_mib(handed)} MiB, taking {ms:,.1f} ms"


def render_summary(breakdown: Breakdown, held: MemoryUsage, rank: int) -> str:
    usage = [("memory of this rank", "MiB")]
    usage += [(_MEMORY[name], _mib(size)) for name, size in memory(breakdown, held).items()]
    operators = [("operators, by their own time", "share", "calls per step", "kind of work")]
    for operator in breakdown.operators[:NUM_OPERATORS]:
        share, calls = operator.seconds / breakdown.total_seconds, operator.calls / len(breakdown.steps)
        operators.append((operator.name[:60], f"{share:.1%}", f"{calls:,.1f}", operator.kind))
    parts: list[Iterable[str]] = [_time(breakdown, rank)]
    parts += [_waiting(breakdown.waiting, len(breakdown.steps))] if breakdown.waiting else []
    parts += [[aligned(usage)], _collectives(breakdown), [aligned(operators)]]
    return "\n".join(line for part in parts for line in [*part, ""])


def memory(breakdown: Breakdown, held: MemoryUsage) -> dict[str, int]:
    """Return bytes by category: persistent memory, and the peak of additional allocations in the recorded steps.

    At the start of a step there are no activations, and only those gradients that stay between steps. The peak above
    that level therefore consists of activations and the remaining gradients.
    """
    above = breakdown.allocated_bytes.get("device" if breakdown.on_device else "cpu", 0)
    return {
        "weights": held.weights,
        "optimizer": held.optimizer,
        "gradients": held.gradients,
        "activations": max(above - (held.gradients - held.gradients_between_steps), 0),
    }


def _time(breakdown: Breakdown, rank: int) -> Iterator[str]:
    where = "the device's kernels" if breakdown.on_device else "the operators of the thread that trains"
    step_seconds = breakdown.total_seconds / len(breakdown.steps)
    yield f"Profile of {_steps(breakdown)} on rank {rank}: {1000 * step_seconds:,.1f} ms per step, by {where}."
    yield "Profiling slows the steps down, small operators most. All work of the loop in these steps is included."
    yield ""
    rows = [("where the time goes", "share", "ms per step")]
    rows += [
        (text, f"{breakdown.shares[kind]:.1%}", f"{1000 * breakdown.seconds[kind] / len(breakdown.steps):,.2f}")
        for kind, text in KINDS.items()
    ]
    yield aligned(rows)
    if breakdown.communication_seconds:
        hidden = 1 - breakdown.seconds["communication"] / breakdown.communication_seconds
        ms = 1000 * breakdown.communication_seconds / len(breakdown.steps)
        yield f"Communication took {ms:,.2f} ms per step, {hidden:.0%} of it overlapped with computation."


def _waiting(waiting: Waiting, num_steps: int) -> Iterator[str]:
    yield f"{waiting.schedule} on rank {waiting.rank} of the {waiting.ranks} of its pipeline"
    ms = 1000 * waiting.seconds / num_steps
    passes = [
        (f"{kind}: {_PASSES[kind]}", f"{waiting.passes.get(kind, 0) / num_steps:g}", f"{count / num_steps:g}")
        for kind, count in waiting.planned_passes.items()
    ]
    idle = f"waiting, of {ms:,.1f} ms", f"{waiting.idle:.1%}", f"{waiting.predicted_idle:.1%}"
    yield aligned([("per step", "measured", "by the schedule"), idle, *passes])
    yield "The schedule's share of waiting assumes stages that take equally long and messages that take no time."


def _collectives(breakdown: Breakdown) -> Iterator[str]:
    if not breakdown.collectives:
        yield "No collectives: one process."
        return
    num = len(breakdown.steps)
    rows: list[Sequence[str]] = [("communication per step, by dimension", "calls", "MiB", "ms", "exposed ms", "hidden")]
    for dimension in breakdown.dimensions:
        rows.append((dimension.name, *_communication(dimension.total, num)))
        rows += [(f"  {name}", *_communication(collective, num)) for name, collective in dimension.collectives.items()]
    yield aligned(rows)
    yield "Exposed: without computation at the same time. Bytes of a call: the larger of its input and output."
    for collective in breakdown.collectives:
        if collective.untyped:
            uncounted = f"the bytes of {collective.untyped} calls are not counted"
            yield f"{collective.name}: {uncounted}: the trace names no data type."


def _communication(communication: Communication, num_steps: int) -> tuple[str, ...]:
    """Format the columns of a row: calls, MiB, ms, exposed ms and the hidden share."""
    seconds = communication.seconds, communication.exposed_seconds
    hidden = f"{communication.hidden_seconds / communication.seconds:.0%}" if communication.seconds else "-"
    ms = (f"{1000 * value / num_steps:,.2f}" for value in seconds)
    return f"{communication.calls / num_steps:,.1f}", _mib(communication.num_bytes / num_steps), *ms, hidden


def _steps(breakdown: Breakdown) -> str:
    first, last = breakdown.steps[0], breakdown.steps[-1]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:,.2f}"
