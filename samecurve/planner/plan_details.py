"""Sections of `plan` about one choice: its memory, its step, and what options ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from samecurve.planner import (
    layout_picture,
    ledger,
    memory,
    overlap,
    printing,
    shape_rules,
    step_time,
    timeline,
)
from samecurve.planner.cluster import Cluster
from samecurve.planner.job import Job
from samecurve.planner.search import Choice
from samecurve.planner.wanted import Wanted


def sections(shown: Choice, wanted: Wanted, machines: Cluster, arguments: argparse.Namespace) -> tuple[list[str], str]:
    """Format the sections about a choice that has a job.

    Args:
        arguments: of the command, which say what is wanted.

    Returns:
        The sections in order, and the content of the --svg file, if there is one.
    """
    job, rows = shown.job, wanted.batch.global_batch_size
    assert job and wanted.source.recipe
    tables = [printing.anatomy_table(each, job.memory_gib) for each in memory.anatomy(job)]
    memory_of = f"Memory of {shown.name}; torch_allocated counts the lines above fragmentation:"
    found = ["\n".join([memory_of, *tables]), printing.step_table(step_time.breakdown(job)), *_asked(job, arguments)]
    drawn = ""
    if arguments.layout:
        found.append(layout_picture.text(job, rows, arguments.order))
        drawn = layout_picture.svg(job, rows, arguments.order) if arguments.svg else ""
    if arguments.simulate:
        text, drawn = timeline.report(job, machines, wanted.source.recipe.checkpoint)
        found.append(text)
    return found, drawn


def _asked(job: Job, arguments: argparse.Namespace) -> Iterator[str]:
    """Generate the tables of --overlap, --ledger and --shapes."""
    if arguments.overlap:
        rows = [[each.axis, f"{each.value:.3f}", each.verdict, each.inputs] for each in overlap.ratios(job)]
        yield printing.table([("communication / computation", "ratio", "", "inputs"), *rows])
    if arguments.ledger:
        tables = [printing.ledger_table(stage, each) for stage, each in ledger.ledgers(job).items() if each]
        yield "\n".join(tables) or "One process exchanges nothing."
    if arguments.shapes:
        told = "\n".join(shape_rules.complaints(job)) or "Every dimension divides as it should."
        yield f"{shape_rules.title(job)}\n{printing.table(shape_rules.table(job))}\n{told}"
