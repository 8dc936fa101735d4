"""Predicted against measured, step time and memory, as a small SVG: a mark for each run, a colour for each source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from benchmarks.planner.figures import Case
from benchmarks.planner.names import short
from samecurve.reports.chart import AXIS, Box, power_text

# Okabe and Ito's palette for colour-blind readers, then darker variants of it
COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c6100")
COLOURS += ("#1f6f99", "#00593f", "#7a3500", "#6b3f57")
WIDTH, HEIGHT, SIDE = 940, 660, 380
TIME, MEMORY = Box(64, 64 + SIDE, 40, 40 + SIDE), Box(534, 534 + SIDE, 40, 40 + SIDE)
# Okabe and Ito's palette for colour-blind readers, then darker variants of it
COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c6100")
COLOURS += ("#1f6f99", "#00593f", "#7a3500", "#6b3f57")
OFF = 0.2  # dashed lines: 20 % too much and too little
MARK, LEGEND_COLUMNS, LEGEND_LINE = 3.2, 2, 20
Point = tuple[str, float, float]


def draw(cases: Sequence[Case]) -> str:
    """Draw the runs with a usable time (left) and memory (right); both axes are logarithmic."""
    sources = sorted({case.source for case in cases if case.seconds or case.memory_gib}, key=short)
    times = [(case.source, case.seconds, case.predicted_seconds) for case in cases if case.seconds]
    held = [(case.source, case.memory_gib, case.predicted_memory_gib) for case in cases if case.memory_gib]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_panel(TIME, times, sources, "step time, s"),
        *_panel(MEMORY, held, sources, "peak memory, GiB"),
        *_legend(sources),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(box: Box, points: Sequence[Point], sources: Sequence[str], title: str) -> list[str]:
    values = [value for point in points for value in point[1:]]
    low, high = math.log10(min(values)) - 0.05, math.log10(max(values)) + 0.05

    def x(value: float) -> float:
        return box.left + SIDE * (math.log10(value) - low) / (high - low)

    def y(value: float) -> float:
        return box.bottom - SIDE * (math.log10(value) - low) / (high - low)

    parts = [f'<text x="{box.left:g}" y="{box.top - 14:g}" font-weight="bold">{escape(title)}</text>']
    powers = range(math.floor(low), math.ceil(high) + 1)
    for tick in (factor * 10.0**power for power in powers for factor in (1, 2, 5)):
        if not low <= math.log10(tick) <= high:
            continue
        across = f'x1="{box.left:g}" x2="{box.right:g}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        down = f'x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{box.top:g}" y2="{box.bottom:g}"'
        parts += [f'<line class="grid" {ends} stroke="#e5e5e5"/>' for ends in (across, down)]
        at = f'x="{box.left - 6:g}" y="{y(tick) + 4:.1f}" text-anchor="end"'
        parts.append(f'<text class="axis" {at} fill="{AXIS}">{power_text(tick)}</text>')
        at = f'x="{x(tick):.1f}" y="{box.bottom + 17:g}" text-anchor="middle"'
        parts.append(f'<text class="axis" {at} fill="{AXIS}">{power_text(tick)}</text>')
    for factor, style in ((1, ""), (1 + OFF, ' stroke-dasharray="5 4"'), (1 / (1 + OFF), ' stroke-dasharray="5 4"')):
        first, last = max(10**low, 10**low / factor), min(10**high, 10**high / factor)
        ends = f'x1="{x(first):.1f}" y1="{y(first * factor):.1f}" x2="{x(last):.1f}" y2="{y(last * factor):.1f}"'
        parts.append(f'<line {ends} stroke="{AXIS}"{style}/>')
    parts += [_mark(x(measured), y(predicted), sources.index(name)) for name, measured, predicted in points]
    middle, turn = (box.top + box.bottom) / 2, box.left - 46
    parts.append(f'<text x="{box.left + SIDE / 2:g}" y="{box.bottom + 36:g}" text-anchor="middle">measured</text>')
    turned = f'transform="rotate(-90 {turn:g} {middle:g})" text-anchor="middle"'
    return [*parts, f'<text x="{turn:g}" y="{middle:g}" {turned}>predicted</text>']


def _mark(x: float, y: float, index: int) -> str:
    """Draw a disc; a square for sources beyond the number of colours."""
    colour = f'fill="{COLOURS[index % len(COLOURS)]}" fill-opacity="0.7"'
    if index < len(COLOURS):
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{MARK}" {colour}/>'
    return f'<rect x="{x - MARK:.1f}" y="{y - MARK:.1f}" width="{2 * MARK:g}" height="{2 * MARK:g}" {colour}/>'


def _legend(sources: Sequence[str]) -> list[str]:
    parts, rows = [], math.ceil(len(sources) / LEGEND_COLUMNS)
    for index, source in enumerate(sources):
        x = TIME.left + (index // rows) * (WIDTH - TIME.left) / LEGEND_COLUMNS
        y = TIME.bottom + 70 + LEGEND_LINE * (index % rows)
        parts += [_mark(x, y, index), f'<text x="{x + 12:g}" y="{y + 4:g}">{escape(short(source))}</text>']
    return parts
