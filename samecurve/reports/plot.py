"""Plot of one quantity of one run or several over the optimizer steps, as a small SVG without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard
from xml.sax.saxutils import escape

from samecurve.reports.chart import LARGEST, SMALLEST, Box, Panel, linear_ticks, powers_of_ten
from samecurve.reports.history import History, Point
from samecurve.run.sessions import SessionRecord

SMALL, LARGE = (440, 250), (900, 400)  # width, height
LEFT, RIGHT, BOTTOM = 58, 16, 40  # margins
TITLE_Y, LEGEND_HEIGHT = 16, 16
# Okabe and Ito's palette for colour-blind readers, without yellow; further runs begin again
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = {
    "line": (1.6, ""),
    "faint": (1.0, 'stroke-opacity="0.35"'),
    "dashed": (1.6, 'stroke-dasharray="5 4"'),
    "dots": (1.2, 'stroke-dasharray="2 3"'),
}  # stroke width, other attributes
WIDER = 2.5
CHARACTER_WIDTH, KEY_WIDTH = 6.6, 24  # width of a character in the legend, and of the line in front of each label
MOST_BUCKETS = 300  # about one per pixel of a plot
MOST_DOTS = 60
LOGARITHMIC_FROM, MOST_POWERS = 50, 6  # ratio of largest to smallest value; maximum number of ticks


@dataclass(frozen=True)
class Series:
    """One line of a plot.

    Attributes:
        label: text in the legend, "" for a line without an entry.
        points: (step, value), sorted by step; None or a non-finite value is a gap.
        run: number of the run, 0-based, which chooses the colour.
        circled: the step of a point to circle.
    """

    label: str
    points: Sequence[Point]
    run: int = 0
    kind: Literal["line", "faint", "dashed", "dots"] = "line"
    circled: int | None = None


@dataclass(frozen=True)
class Mark:
    """A vertical line at `step`. label: short text at its top. tooltip: text shown when a pointer rests on it."""

    step: int
    label: str
    tooltip: str
    run: int = 0


@dataclass(frozen=True)
class Scale:
    """Vertical scale. from_zero: the axis includes 0. logarithmic: if the values are positive and far apart."""

    from_zero: bool = False
    logarithmic: bool = False


def plot(
    title: str,
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
    scale: Scale = Scale(),
    steps: tuple[int, int] | None = None,
    size: tuple[int, int] = SMALL,
) -> str:
    """Draw a plot and return the SVG text; "" if no series has a finite value.

    Args:
        marks: vertical lines; those outside the axis are left out.
        steps: ends of the horizontal axis; by default the first and the last step of the points.
    """
    width, height = size
    values = [value for line in series for _, value in line.points if is_finite(value)]
    if not values:
        return ""
    low, high = min(values), max(values)
    logarithmic = scale.logarithmic and SMALLEST <= low and high <= LARGEST and high / low >= LOGARITHMIC_FROM
    if logarithmic:
        lowest, highest = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = powers_of_ten(lowest, highest, math.ceil((highest - lowest) / MOST_POWERS))
    else:
        ticks = linear_ticks(min(low, 0.0), max(high, 0.0)) if scale.from_zero else linear_ticks(low, high)
    wide = any(line.run for line in series)
    legend, rows = _legend([line for line in series if line.label and len(series) > 1], wide, width)
    top = TITLE_Y + 18 + LEGEND_HEIGHT * rows
    numbers = [step for line in series for step, _ in line.points]
    first, last = steps or (min(numbers), max(numbers))
    panel = Panel(Box(LEFT, width - RIGHT, top, height - BOTTOM), (first, last), ticks, logarithmic)
    named = f"{title} (logarithmic)" if logarithmic else title
    shape = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {shape} font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *panel.frame(named, TITLE_Y, step_y=32),
        *legend,
        *_marks(panel, [mark for mark in marks if first <= mark.step <= last]),
        *(line for line in series for line in _line(panel, line, wide)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _legend(series: Sequence[Series], wide: bool, room: int) -> tuple[list[str], int]:
    """Draw the legend below the title and return it with its number of rows."""
    parts, x, row = [], float(LEFT), min(len(series), 1)
    for line in series:
        width = KEY_WIDTH + CHARACTER_WIDTH * len(line.label) + 14
        if x + width > room and x > LEFT:
            x, row = float(LEFT), row + 1
        y = TITLE_Y + LEGEND_HEIGHT * row - 2
        parts.append(f'<path d="M{x:.1f} {y}h18" {_stroke(line, wide)}/>')
        parts.append(f'<text x="{x + KEY_WIDTH:.1f}" y="{y + 4}">{escape(line.label)}</text>')
        x += width
    return parts, row


def _stroke(series: Series, wide: bool) -> str:
    """Return the line style. wide: draw the first run wider, to stay visible where another covers it."""
    width, style = STYLES[series.kind]
    width *= WIDER if wide and not series.run else 1
    shape = f'fill="none" stroke-linecap="round" stroke-width="{width:g}" {style}'.rstrip()
    return f'stroke="{COLOURS[series.run % len(COLOURS)]}" {shape}'


def _line(panel: Panel, series: Series, wide: bool) -> Iterator[str]:
    pieces = [[(panel.x(step), panel.y(value)) for step, value in piece] for piece in thinned(series.points)]
    if not pieces:
        return
    shape = "".join("M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in piece) for piece in pieces if len(piece) > 1)
    # An isolated point is drawn as a line of length 0, which round caps make visible.
    shape += "".join(f"M{x:.1f},{y:.1f}h0" for piece in pieces if len(piece) == 1 for x, y in piece)
    yield f'<path d="{shape}" stroke-linejoin="round" {_stroke(series, wide)}/>'
    points = [point for piece in pieces for point in piece]
    if series.kind == "dots" and len(points) <= MOST_DOTS:
        radius = 4 if wide and not series.run else 2.5
        rest = f'r="{radius}" fill="{COLOURS[series.run % len(COLOURS)]}"'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" {rest}/>' for x, y in points)
    for step, value in series.points:
        if step == series.circled and is_finite(value):
            at = f'cx="{panel.x(step):.1f}" cy="{panel.y(value):.1f}" r="6"'
            yield f'<circle {at} fill="none" stroke="{COLOURS[series.run % len(COLOURS)]}" stroke-width="2"/>'


def _marks(panel: Panel, marks: Sequence[Mark]) -> Iterator[str]:
    """Draw each mark's line, and its label unless that would overlap the previous label."""
    free = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.step):
        x, colour = panel.x(mark.step), COLOURS[mark.run % len(COLOURS)]
        title = f"<title>{escape(mark.tooltip)}</title>"
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{panel.box.top:g}" y2="{panel.box.bottom:g}"'
        line = f'<line {ends} stroke="{colour}" stroke-dasharray="1 3" stroke-width="1.5"/>'
        label = ""
        if x >= free:
            at = f'x="{x:.1f}" y="{panel.box.top - 3:g}" text-anchor="middle" font-size="10"'
            label = f'<text {at} fill="{colour}">{escape(mark.label)}</text>'
            free = x + CHARACTER_WIDTH * (len(mark.label) + 1)
        yield f"<g>{title}{line}{label}</g>"


def thinned(points: Sequence[Point], most: int = MOST_BUCKETS) -> list[list[tuple[int, float]]]:
    """Downsample a line to the lowest and highest point of each of `most` equal buckets of steps.

    A spike of a single step is thus never lost. A bucket that has steps but no finite value breaks the line.

    Returns:
        The unbroken pieces of the line.
    """
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    width = max((last - first + 1) / most, 1)
    buckets: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        bucket = buckets.setdefault(int((step - first) / width), [])
        if is_finite(value):
            bucket.append((step, value))
    pieces: list[list[tuple[int, float]]] = [[]]
    for bucket in buckets.values():
        if bucket:
            ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
            pieces[-1] += sorted(ends)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def noisy(history: History, name: str, run: int = 0, who: str = "") -> list[Series]:
    """Make two series of a key of history.SMOOTHED: its values as a faint line, and a smoothed line.

    Args:
        run: number of the run in the chart, 0-based, which chooses the colour.
        who: label prefix of the run, "" for a chart of one run.
    """
    over = f"{who}exponential mean of about {history.window} steps"
    values = Series("" if who else "each step", history.curves.get(name, []), run, "faint")
    return [values, Series(over, history.smoothed.get(name, []), run)]


def loss_series(history: History, run: int = 0, who: str = "") -> list[Series]:
    """Make the series of the loss, and of the held-out loss with its lowest value circled. See `noisy`."""
    lowest = history.lowest("eval_loss")
    if lowest is None:
        return noisy(history, "loss", run, who)
    label = f"{who}held out, lowest {lowest[0]:.4f} at step {lowest[1]:,}"
    return [*noisy(history, "loss", run, who), Series(label, history.curves["eval_loss"], run, "dots", lowest[1])]


def session_marks(known: Sequence[SessionRecord], run: int = 0) -> list[Mark]:
    """Mark the first step of each resumed session with the session's number, from 1.

    Sessions that resumed from the same step share a mark.
    """
    at: dict[int, list[int]] = {}
    for number, session in enumerate(known, 1):
        if session.start_step:
            at.setdefault(session.start_step, []).append(number)
    marks = []
    for start, numbers in at.items():
        label = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        lines = []
        for number in numbers:
            strategy, world_size = (known[number - 1].facts.get(key, "not known") for key in ("strategy", "world_size"))
            lines.append(f"session {number} resumed after step {start}: {strategy}, world size {world_size}")
        marks.append(Mark(start + 1, label, "\n".join(lines), run))
    return marks
