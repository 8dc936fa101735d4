"""One quantity of a run, or of two, over the optimizer steps: an SVG that needs no script and stays small.

As in chart.py, colours are attributes and classes are for a page's style: `run0` and `run1` for the lines of the runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape

from samecurve.reports.chart import Box, Panel, linear_ticks, powers_of_ten
from samecurve.run.sessions import SessionRecord

WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, BOTTOM = 58, 16, 40  # margins
TITLE_Y, LEGEND_HEIGHT = 16, 16
COLOURS = ("#0072b2", "#d55e00")  # of Okabe and Ito's palette for colour-blind readers
STYLES = {
    "line": (1.6, ""),
    "faint": (1.0, 'stroke-opacity="0.35"'),
    "dashed": (1.6, 'stroke-dasharray="5 4"'),
    "dots": (1.2, 'stroke-dasharray="2 3"'),
}  # width and the rest
WIDER = 2.5
CHARACTER_WIDTH, KEY_WIDTH = 6.6, 24  # of the legend's texts, and of the line before each
MOST_BUCKETS = 300  # about one for each pixel of a plot
MOST_DOTS = 60
LOGARITHMIC_FROM, MOST_POWERS = 50, 6  # times the smallest value; ticks
SMOOTHED_STEPS, SMOOTHED_SHARE = 10, 50  # the meter's own 10 steps; of a long run a fiftieth

Point = tuple[int, "float | None"]


@dataclass(frozen=True)
class Series:
    """points: (step, value), by step; None (or what is not finite) is a gap. run: 0 or 1, decides the colour.

    label: for the legend, "" for a line that is not in it.
    """

    label: str
    points: Sequence[Point]
    run: int = 0
    kind: Literal["line", "faint", "dashed", "dots"] = "line"


@dataclass(frozen=True)
class Mark:
    """A vertical line at `step`. label: short, at its top. told: what a pointer that rests on it is shown."""

    step: int
    label: str
    tooltip: str
    run: int = 0


@dataclass(frozen=True)
class Scale:
    """from_zero: the axis holds 0. logarithmic: where the values are positive and far apart."""

    from_zero: bool = False
    logarithmic: bool = False


def plot(
    title: str,
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
    scale: Scale = Scale(),
    steps: tuple[int, int] | None = None,
) -> str:
    """The SVG's text; "" when no series holds a finite number. steps: the axis's ends; default: the points'."""
    values = [value for each in series for _, value in each.points if _finite(value)]
    if not values:
        return ""
    ticks, logarithmic = _ticks(min(values), max(values), scale)
    wide = any(each.run for each in series)
    legend, rows = _legend([each for each in series if each.label and len(series) > 1], wide)
    top = TITLE_Y + 18 + LEGEND_HEIGHT * rows
    numbers = [step for each in series for step, _ in each.points]
    first, last = steps or (min(numbers), max(numbers))
    panel = Panel(Box(LEFT, WIDTH - RIGHT, top, HEIGHT - BOTTOM), (first, last), ticks, logarithmic)
    named = f"{title} (logarithmic)" if logarithmic else title
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *panel.frame(named, TITLE_Y, step_y=32),
        *legend,
        *_marks(panel, [mark for mark in marks if first <= mark.step <= last]),
        *(line for each in series for line in _line(panel, each, wide)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _ticks(low: float, high: float, scale: Scale) -> tuple[list[float], bool]:
    if scale.logarithmic and low > 0 and high / low >= LOGARITHMIC_FROM:
        lowest, highest = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return powers_of_ten(lowest, highest, math.ceil((highest - lowest) / MOST_POWERS)), True
    if scale.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    return linear_ticks(low, high), False


def _legend(series: Sequence[Series], wide: bool) -> tuple[list[str], int]:
    """The keys below the title, and how many rows they take."""
    parts, x, row = [], float(LEFT), min(len(series), 1)
    for each in series:
        width = KEY_WIDTH + CHARACTER_WIDTH * len(each.label) + 14
        if x + width > WIDTH and x > LEFT:
            x, row = float(LEFT), row + 1
        y = TITLE_Y + LEGEND_HEIGHT * row - 2
        parts.append(f'<path d="M{x:.1f} {y}h18" {_stroke(each, wide)}/>')
        parts.append(f'<text x="{x + KEY_WIDTH:.1f}" y="{y + 4}">{escape(each.label)}</text>')
        x += width
    return parts, row


def _stroke(series: Series, wide: bool) -> str:
    """wide: of two runs the first has wider lines, so that it is seen below the second where both are equal."""
    width, style = STYLES[series.kind]
    width *= WIDER if wide and not series.run else 1
    shape = f'fill="none" stroke-linecap="round" stroke-width="{width:g}" {style}'.rstrip()
    return f'class="run{series.run}" stroke="{COLOURS[series.run]}" {shape}'


def _line(panel: Panel, series: Series, wide: bool) -> Iterator[str]:
    pieces = [[(panel.x(step), panel.y(value)) for step, value in piece] for piece in thinned(series.points)]
    if not pieces:
        return
    shape = "".join("M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in piece) for piece in pieces if len(piece) > 1)
    # a point alone is a line without length, which round ends make visible
    shape += "".join(f"M{x:.1f},{y:.1f}h0" for piece in pieces if len(piece) == 1 for x, y in piece)
    yield f'<path d="{shape}" stroke-linejoin="round" {_stroke(series, wide)}/>'
    points = [point for piece in pieces for point in piece]
    if series.kind == "dots" and len(points) <= MOST_DOTS:
        radius = 4 if wide and not series.run else 2.5
        rest = f'r="{radius}" class="dot{series.run}" fill="{COLOURS[series.run]}"'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" {rest}/>' for x, y in points)


def _marks(panel: Panel, marks: Sequence[Mark]) -> Iterator[str]:
    """Each one's line; its label only where there is room beside the one before."""
    free = -math.inf
    for mark in sorted(marks, key=lambda mark: mark.step):
        x, colour = panel.x(mark.step), COLOURS[mark.run]
        title = f"<title>{escape(mark.tooltip)}</title>"
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{panel.box.top:g}" y2="{panel.box.bottom:g}"'
        line = f'<line class="run{mark.run}" {ends} stroke="{colour}" stroke-dasharray="1 3" stroke-width="1.5"/>'
        label = ""
        if x >= free:
            at = f'x="{x:.1f}" y="{panel.box.top - 3:g}" text-anchor="middle" font-size="10"'
            label = f'<text class="mark{mark.run}" {at} fill="{colour}">{escape(mark.label)}</text>'
            free = x + CHARACTER_WIDTH * (len(mark.label) + 1)
        yield f"<g>{title}{line}{label}</g>"


def thinned(points: Sequence[Point], most: int = MOST_BUCKETS) -> list[list[tuple[int, float]]]:
    """The unbroken pieces of a line. Of each of `most` equal parts of the steps, the lowest and the highest point.

    So a single step's spike is never lost. A part without a finite value, though it has steps, breaks the line.
    """
    if not points:
        return []
    first, last = points[0][0], points[-1][0]
    width = max((last - first + 1) / most, 1)
    buckets: dict[int, list[tuple[int, float]]] = {}
    for step, value in points:
        bucket = buckets.setdefault(int((step - first) / width), [])
        if _finite(value):
            bucket.append((step, value))
    pieces: list[list[tuple[int, float]]] = [[]]
    for bucket in buckets.values():
        if bucket:
            ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
            pieces[-1] += sorted(ends)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def column(metrics: Sequence[dict], name: str) -> list[Point]:
    """(step, value) of the records that have the key."""
    return [(record["step"], record[name]) for record in metrics if name in record]


def window(num_steps: int) -> int:
    return max(SMOOTHED_STEPS, num_steps // SMOOTHED_SHARE)


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Exponential moving average over about `window` steps, without the bias towards 0 at the start, as the meter's."""
    decay, average, weight = 1 - 1 / window(len(points)), 0.0, 0.0
    found: list[Point] = []
    for step, value in points:
        if not _finite(value):
            found.append((step, None))
            continue
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        found.append((step, average / weight))
    return found


def noisy(metrics: Sequence[dict], name: str, run: int = 0, who: str = "") -> list[Series]:
    """Each step faint, and smoothed on top of it. who: before the labels, where there are two runs."""
    points = column(metrics, name)
    over = f"{who}smoothed over {window(len(points))} steps"
    return [Series("" if who else "each step", points, run, "faint"), Series(over, smoothed(points), run)]


def loss_series(metrics: Sequence[dict], run: int = 0, who: str = "") -> list[Series]:
    held_out = column(metrics, "eval_loss")
    return [*noisy(metrics, "loss", run, who), *([Series(f"{who}held out", held_out, run, "dots")] if held_out else [])]


def session_marks(known: Sequence[SessionRecord], run: int = 0) -> list[Mark]:
    """Where a run went on: at the first step of each session but the one that began it, numbered as in a list from 1.

    Sessions that went on from the same step share a mark.
    """
    at: dict[int, list[int]] = {}
    for number, session in enumerate(known, 1):
        if session.start_step:
            at.setdefault(session.start_step, []).append(number)
    marks = []
    for start, numbers in at.items():
        label = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        tooltip = "\n".join(_began(number, known[number - 1]) for number in numbers)
        marks.append(Mark(start + 1, label, tooltip, run))
    return marks


def _began(number: int, session: SessionRecord) -> str:
    strategy, world_size = (session.facts.get(key, "not known") for key in ("strategy", "world_size"))
    return f"session {number} went on after step {session.start_step}: {strategy}, world size {world_size}"
