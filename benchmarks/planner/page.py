"""The page of the planner's errors on published runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import date
from math import expm1

from benchmarks.machine import commit
from benchmarks.markdown import table
from benchmarks.planner import cells, figures, fits
from benchmarks.planner.figures import Case
from benchmarks.planner.names import short

HEADING = """# How well the planner predicts

Written by `python scripts/fit_planner.py benchmarks/planner/runs.csv --page` from [published runs](planner/README.md).
Every run is predicted with constants that were fitted without its source, and its 80 % intervals come from the errors
of the other sources. The playbook's grid is one source of one software; it is left out by number of GPUs, and other
sizes of it stay in the fit, so that its rows are easier to predict than a new source. A worst source or number of GPUs
is the one with the largest median error, however few its runs. `reported` rows out of memory, for which there is a
bound too, and mixtures of experts are not in the table. Calculated on {date} at commit {commit}.
"""
SOURCES = """
## By source

Errors are predicted / measured - 1 in %: the median of their sizes, the 90 % quantile of their sizes, and the median
with its sign. An empty cell: the source has published no usable number. {count} runs have a time, {held} have memory.
"""
OUTCOMES = """
## Out of memory, and the first choice

A run out of memory is missed where it is predicted to fit. `states`: weights, gradients and optimizer alone exceed the
GPU. `extrapolated`: measured memory at smaller micro-batches, continued linearly, exceeds it by a tenth.
"""
REGRET = """
Of {cells} cells (one model, kind and number of GPUs, row length and global batch, with at least {few} measured runs),
the first choice is slower than the best published run by {middle:.1f} % (median), and by {worst:.0f} % in the
worst cell: {name}.
The first choice is what `plan` would print first: among the runs that may be as fast as the fastest, as far as can be
predicted, the simplest. The fastest prediction is slower by {plain:.1f} % (median) and {plain_worst:.0f} % (worst).
1 - Spearman's correlation of predicted and measured speed is 0 % for the same order and 200 % for the reverse; its
worst cell has {order:.0f} %.
"""
ORDER = """
## Which of two is faster

Pairs of runs of one source, software, model, batch, row length and number of GPUs, by how far their predicted step
times differ, and how often the one that is predicted to be faster was. `plan` calls strategies ties up to a difference
of 7 %, from which on the order is right in 8 of 10 cases.
"""
LIMITS = """
## What the constants cannot know

- Sources are few. A software with one small source keeps nearly the constants of an unknown one, and DeepSpeed's
  sources differ by more than its constants can follow: ZeRO-3 on 4 GPUs with 512 tokens each is bound by the host,
  and ZeRO-3 on 384 to 2,240 GPUs by a network that no other source of the table describes.
- The same configuration was published with times that differ by 11 % and more, and a 52B run with 125, 129 and 217 s.
- In the fit, which sees every source, the mean of the sources' medians is {time:.1f} % (time) and {memory:.1f} %
  (memory). The difference to the figures above is what a new source costs.
"""


def page(cases: Sequence[Case], inside: Sequence[fits.LeftOut], picture: str) -> str:
    """Format the page.

    Args:
        cases: every run, predicted without its source.
        inside: the runs with constants that were fitted to them, too.
        picture: name of the picture beside the page.
    """
    times, held = figures.times(cases), figures.memories(cases)
    return "\n".join(
        [
            HEADING.format(date=date.today(), commit=commit("benchmarks/planner.md", "benchmarks/planner.svg")),
            _headline(cases),
            f"\n![predicted against measured step time and memory, by source]({picture})",
            "\nThe dashed lines are 20 % off.",
            SOURCES.format(count=len(times), held=len(held)),
            _sources(cases),
            OUTCOMES,
            _outcomes(cases),
            _regret(cases),
            ORDER,
            _order(cases),
            LIMITS.format(
                time=_inside(fits.timed(inside), "time_error"), memory=_inside(fits.held(inside), "memory_error")
            ).rstrip(),
            "",
        ]
    )


def _regret(cases: Sequence[Case]) -> str:
    regret, plain = (cells.regrets(cases, choose) for choose in (cells.answered, cells.fastest))
    worst, order = max(regret, key=lambda name: regret[name]), cells.disorder(cases)
    return REGRET.format(
        cells=len(regret), few=cells.FEWEST_OF_A_CELL, middle=100 * statistics.median(regret.values()),
        worst=100 * regret[worst], name=worst, plain=100 * statistics.median(plain.values()),
        plain_worst=100 * max(plain.values()), order=100 * max(order.values()),
    ).rstrip()  # fmt: skip


def _order(cases: Sequence[Case]) -> str:
    rows = [
        [f"{100 * low:g} to {100 * high:g} %", str(pairs), f"{100 * right:.0f} %"]
        for low, high, pairs, right in cells.order(cases)
    ]
    return table(["predicted difference", "pairs", "in the right order"], rows)


def _headline(cases: Sequence[Case]) -> str:
    rows = [
        [each.name, _range(each.bound), _range(each.aim), f"{each.value:.1f} %", each.verdict]
        for each in figures.headline(cases)
    ]
    return table(["figure", "bound", "aim", "reached", ""], rows)


def _range(ends: tuple[float, float]) -> str:
    low, high = ends
    return f"{low:g} to {high:g} %" if low else f"at most {high:g} %" if high else "none"


def _sources(cases: Sequence[Case]) -> str:
    groups = figures.by(lambda case: case.fold, cases)
    rows = []
    for name, group in groups.items():
        source, _, size = name.partition(": ") if name.startswith(fits.GRID) else (name, "", "")
        cells = [*_errors(figures.times(group)), *_errors(figures.memories(group))]
        rows.append([" ".join(filter(None, [short(source), size])), *cells])
    everything = [*_errors(figures.times(cases)), *_errors(figures.memories(cases))]
    header = ["source", "runs", "time", "90 %", "sign", "runs", "memory", "90 %", "sign"]
    return table(header, [*rows, ["all runs", *everything]])


def _errors(errors: Sequence[float]) -> list[str]:
    if not errors:
        return [""] * 4
    middle, high, bias = figures.middle(errors), figures.high(errors), statistics.median(errors)
    return [str(len(errors)), f"{100 * middle:.1f}", f"{100 * high:.1f}", f"{100 * bias:+.1f}"]


def _outcomes(cases: Sequence[Case]) -> str:
    rows = [
        [f"out of memory, {evidence}", str(len(values)), str(sum(values)), f"{100 * statistics.mean(values):.1f} %"]
        for evidence, values in figures.missed(cases).items()
    ]
    flags = figures.flagged(cases)
    ran = ["ran", str(len(flags)), str(sum(flags)), f"{100 * statistics.mean(flags):.1f} %"]
    return table(["outcome", "runs", "predicted wrongly", "share"], [*rows, ran])


def _inside(runs: Sequence[fits.LeftOut], error: str) -> float:
    """Mean of the sources' medians in the fit, in %."""
    sources: dict[str, list[float]] = {}
    for each in runs:
        sources.setdefault(each.run.source, []).append(expm1(getattr(each, error)))
    return 100 * statistics.mean(map(figures.middle, sources.values()))
