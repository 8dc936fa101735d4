"""Sections of `plan` about one choice: its memory, its step, and what options ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from samecurve.planner import ledger, memory, overlap, placement, printing, shape_rules, step_time
from samecurve.planner.job import Job
from samecurve.planner.wanted import Wanted


def sections(name: str, job: Job, wanted: Wanted, arguments: argparse.Namespace) -> Iterator[str]:
    """Generate the sections about a choice: memory, step, and those of --overlap, --ledger, --shapes and --layout.

    Args:
        name: of the strategy.
        arguments: of the command, which say what is wanted.
    """
    tables = [printing.anatomy_table(stage, job.memory_gib) for stage in memory.anatomy(job)]
    yield "\n".join([f"Memory of {name}; torch_allocated counts the lines above fragmentation:", *tables])
    yield printing.step_table(step_time.breakdown(job))
    if arguments.overlap:
        rows = [[ratio.axis, f"{ratio.value:.3f}", ratio.verdict, ratio.inputs] for ratio in overlap.ratios(job)]
        yield printing.table([("communication / computation", "ratio", "", "inputs"), *rows])
    if arguments.ledger:
        tables = [printing.ledger_table(stage, part) for stage, part in ledger.ledgers(job).items() if part]
        yield "\n".join(tables) or "One process exchanges nothing."
    if arguments.shapes:
        complaints = "\n".join(shape_rules.complaints(job)) or "Every dimension divides as it should."
        yield f"{shape_rules.title(job)}\n{printing.table(shape_rules.table(job))}\n{complaints}"
    if arguments.layout:
        yield placement.picture(job, wanted.batch.global_batch_size, arguments.order)
