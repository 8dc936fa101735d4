"""Tables and bars of a plan, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from samecurve.planner.hardware import GIB, MIB
from samecurve.planner.ledger import Exchange
from samecurve.planner.memory import Anatomy, overhead
from samecurve.planner.step_time import StepTime
from samecurve.planner.tensor_lines import MOMENTS

BAR = 60


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns; the first row is the header and the first column text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if not index else cell.rjust(width) for index, (cell, width) in enumerate(pairs))
        for pairs in ([*zip(row, widths, strict=True)] for row in rows)
    )


def seconds(value: float) -> str:
    """Format seconds with three figures, 1,000 and more without an exponent: 0.139, 15.7, 86,400."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def anatomy_table(each: Anatomy, gpu_gib: float) -> str:
    """Format one class of ranks: GiB of every line at every moment, its formula and source, and a bar of the peak."""
    rows = [[f"{each.stage.name} stage, GiB", *MOMENTS]]
    shown = [line for line in (*each.lines, *overhead(each)) if any(getattr(line, moment) for moment in MOMENTS)]
    rows += [[line.name, *(f"{getattr(line, moment) / GIB:.2f}" for moment in MOMENTS)] for line in shown]
    rows.append(["total", *(f"{sum(getattr(line, moment) for line in shown) / GIB:.2f}" for moment in MOMENTS)])
    texts = table(rows).splitlines()
    notes = ["", *(f"{line.formula} ({line.source})" for line in shown), ""]
    described = [f"{text}  {note}".rstrip() for text, note in zip(texts, notes, strict=True)]
    parts = [(line.name, getattr(line, each.moment) / GIB) for line in shown]
    return "\n".join([*described, bar(parts, max(gpu_gib, sum(value for _, value in parts)), f"of {gpu_gib:.0f} GiB")])


def bar(parts: Sequence[tuple[str, float]], whole: float, label: str) -> str:
    """Draw parts of a whole as one bar, a letter for each, with a legend."""
    drawn, legend, end = "", [], 0.0
    for index, (name, value) in enumerate(part for part in parts if part[1] > 0):
        letter = chr(ord("a") + index)
        end += value
        # counted from the start of the bar, so that rounding errors do not add up
        cells = round(BAR * end / whole) - len(drawn)
        drawn += letter * max(cells, 0)
        legend.append(f"{letter} {name}")
    return f"|{drawn[:BAR].ljust(BAR, '.')}| {label}\n " + ", ".join(legend)


def step_table(time: StepTime) -> str:
    """Format the parts of a step in seconds, with a bar."""
    parts = [(each.name.replace("_", " "), getattr(time, each.name)) for each in fields(time)]
    rows = [["step, s", ""], *([name, f"{value:.4f}"] for name, value in parts if value)]
    return table([*rows, ["total", f"{time.total:.4f}"]]) + "\n" + bar(parts, time.total, f"of {time.total:.3f} s")


def ledger_table(stage: str, exchanges: Sequence[Exchange]) -> str:
    """Format the bytes that a rank of a stage exchanges per step."""
    rows = [(each.axis, each.collective, f"{each.num_bytes / MIB:,.3f}", each.content) for each in exchanges]
    total = sum(each.num_bytes for each in exchanges) / MIB
    header = (f"{stage} stage, per rank and step", "collective", "MiB", "content")
    return table([header, *rows, ("total", "", f"{total:,.3f}", "")])
