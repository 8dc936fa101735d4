"""Loss curves as a small hand-written SVG: the reference's curve, and a bar for how far each other one is from it.

All colours are attributes, for a light background.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, TOP, BOTTOM = 900, 34, 44
CURVE_LEFT, CURVE_RIGHT = 60, 390
BARS_LEFT, BARS_RIGHT, BAR_HEIGHT = 590, 870, 14
SAME, DIFFERENT, REFERENCE = "#0072b2", "#d55e00", "#000000"  # of Okabe and Ito's palette for colour-blind readers
LOWEST_POWER, HIGHEST_POWER = -10, -2  # powers of ten: the range of the bars
AXIS = "#666666"
SMALLEST, LARGEST = 1e-300, 1e300  # absolute values that are told apart: spans and ticks beyond fit no float
SHORTENED = 1e4  # numbers from here on are abbreviated with a letter (k, M, G)


@dataclass(frozen=True)
class Curve:
    """A labelled curve. difference: its largest one from the reference, relative; infinite where steps are missing."""

    label: str
    difference: float


def relative_difference(value: float | None, expected: float | None) -> float | None:
    """Compute |value - expected| / |expected|; None if either is missing, and for 0 / 0."""
    if value is None or expected is None or value == expected == 0:
        return None
    return abs(float(value) - float(expected)) / abs(expected) if expected else math.inf


def chart(points: Sequence[tuple[int, float | None]], curves: Sequence[Curve], title: str, tolerance: float) -> str:
    """Draw the curve of the reference, `curves[0]`, and bars for the others. Returns the SVG text.

    `tolerance` is a relative difference of the loss, drawn as a dashed line across the bars.
    """
    reference, others = curves[0], curves[1:]
    bottom = TOP + max(BAR_HEIGHT * len(others), 200)
    known = [value for _, value in points if value is not None]
    box = Box(CURVE_LEFT, CURVE_RIGHT, TOP, bottom)
    ticks = linear_ticks(min(known, default=0), max(known, default=0))
    loss = Panel(box, (points[0][0], points[-1][0]), ticks)
    height = bottom + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *loss.frame(f"{title}: loss under {reference.label}"),
        loss.line(points, f'stroke="{REFERENCE}" stroke-width="2"'),
        *(_bars(others, reference, tolerance, bottom) if others else ()),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bars(curves: Sequence[Curve], reference: Curve, tolerance: float, bottom: float) -> list[str]:
    """Draw each curve's largest relative difference from the reference, on a logarithmic axis."""

    def x(value: float) -> float:
        share = (math.log10(max(value, 10.0**LOWEST_POWER)) - LOWEST_POWER) / (HIGHEST_POWER - LOWEST_POWER)
        return BARS_LEFT + min(share, 1.0) * (BARS_RIGHT - BARS_LEFT)

    title = f"largest relative difference from {reference.label} at any step"
    parts = [f'<text x="{BARS_RIGHT}" y="{TOP - 14}" font-weight="bold" text-anchor="end">{escape(title)}</text>']
    for tick in powers_of_ten(apart=2):
        ends = f'x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{bottom}"'
        parts.append(f'<line {ends} stroke="#e5e5e5"/>')
        at = f'x="{x(tick):.1f}" y="{bottom + 17}" text-anchor="middle"'
        parts.append(f'<text {at} fill="{AXIS}">{power_text(tick)}</text>')
    for row, curve in enumerate(curves):
        y, colour = TOP + BAR_HEIGHT * row, SAME if curve.difference <= tolerance else DIFFERENT
        size = f'width="{x(curve.difference) - BARS_LEFT:.1f}" height="{BAR_HEIGHT - 4}"'
        parts.append(f'<rect x="{BARS_LEFT}" y="{y + 2}" {size} fill="{colour}"/>')
        parts.append(f'<text x="{BARS_LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(curve.label)}</text>')
    ends = f'x1="{x(tolerance):.1f}" x2="{x(tolerance):.1f}" y1="{TOP}" y2="{bottom}"'
    parts.append(f'<line {ends} stroke="{DIFFERENT}" stroke-dasharray="6 4"/>')
    at = f'x="{x(tolerance):.1f}" y="{bottom + 34}" text-anchor="middle"'
    parts.append(f'<text {at} fill="{DIFFERENT}">tolerance {tolerance:g}</text>')
    return parts


@dataclass(frozen=True)
class Box:
    """Edges of a plot area, in SVG units; y grows downwards."""

    left: float
    right: float
    top: float
    bottom: float


class Panel:
    """Axes and scales of a plot area.

    Args:
        steps: the first and the last step, the ends of the horizontal axis.
        ticks: ticks of the vertical axis; the first and the last are its ends.
    """

    def __init__(self, box: Box, steps: tuple[int, int], ticks: Sequence[float], logarithmic: bool = False):
        self.box, self._steps, self._ticks = box, steps, ticks
        self._scale: Callable[[float], float] = math.log10 if logarithmic else float
        self._text: Callable[[float], str] = power_text if logarithmic else tick_text

    def frame(self, title: str, title_y: float | None = None, step_y: float = 34) -> list[str]:
        """Draw title, axes and grid.

        Args:
            title_y: vertical position of the title; by default above the box.
            step_y: distance of the word "step" below the box.
        """
        box = self.box
        title_y = box.top - 14 if title_y is None else title_y
        parts = [f'<text x="{box.left:g}" y="{title_y:g}" font-weight="bold">{escape(title)}</text>']
        for tick in self._ticks:
            y, label = self.y(tick), escape(self._text(tick))
            ends = f'x1="{box.left:g}" x2="{box.right:g}" y1="{y:.1f}" y2="{y:.1f}"'
            parts.append(f'<line {ends} stroke="#e5e5e5"/>')
            at = f'x="{box.left - 6:g}" y="{y + 4:.1f}" text-anchor="end"'
            parts.append(f'<text {at} fill="{AXIS}">{label}</text>')
        for step in step_ticks(*self._steps):
            ends = f'x1="{self.x(step):.1f}" x2="{self.x(step):.1f}" y1="{box.bottom:g}" y2="{box.bottom + 4:g}"'
            parts.append(f'<line {ends} stroke="{AXIS}"/>')
            parts.append(self._below(self.x(step), 17, tick_text(step)))
        parts.append(self._below((box.left + box.right) / 2, step_y, "step"))
        shape = f"M{box.left:g} {box.top:g}V{box.bottom:g}H{box.right:g}"
        parts.append(f'<path d="{shape}" fill="none" stroke="{AXIS}"/>')
        return parts

    def _below(self, x: float, distance: float, text: str) -> str:
        at = f'x="{x:.1f}" y="{self.box.bottom + distance:g}" text-anchor="middle"'
        return f'<text {at} fill="{AXIS}">{text}</text>'

    def line(self, points: Sequence[tuple[int, float | None]], style: str) -> str:
        drawn = [f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points if value is not None]
        shape = f'points="{" ".join(drawn)}" fill="none" stroke-linejoin="round"'
        return f"<polyline {shape} {style}/>"

    def x(self, step: float) -> float:
        first, last = self._steps
        return self.box.left + (self.box.right - self.box.left) * (step - first) / max(last - first, 1)

    def y(self, value: float) -> float:
        """Map a value to a vertical position. Values outside the ticks (such as a difference of 0) map to the edge."""
        low, high = self._scale(self._ticks[0]), self._scale(self._ticks[-1])
        share = (self._scale(min(max(value, self._ticks[0]), self._ticks[-1])) - low) / (high - low)
        return self.box.bottom - share * (self.box.bottom - self.box.top)


def linear_ticks(low: float, high: float) -> list[float]:
    """Choose ticks that enclose [low, high]: at most about seven, spaced by 1, 2 or 5 times a power of ten.

    They end near LARGEST, whatever the values.
    """
    low, high = (min(max(value, -LARGEST), LARGEST) for value in (low, high))
    span, size = high - low, max(abs(low), abs(high))
    if span < max(1e-12 * size, SMALLEST):  # a constant curve needs a span, too
        span = size if size >= SMALLEST else 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    unit = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 6)
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return [index * unit for index in range(first, max(last, first + 1) + 1)]


def powers_of_ten(lowest: int = LOWEST_POWER, highest: int = HIGHEST_POWER, apart: int = 1) -> list[float]:
    """List powers of ten from the lowest exponent up to at least the highest, `apart` exponents apart."""
    return [10.0**power for power in range(lowest, highest + apart, apart)]


def step_ticks(first: int, last: int) -> list[int]:
    """Choose the first step and round ones, without those so near to the first that their labels would overlap."""
    room = (last - first) / 12
    rounds = [round(tick) for tick in linear_ticks(first, last) if tick == round(tick)]  # no ticks between steps
    return [first, *(tick for tick in rounds if first + room < tick <= last)]


def tick_text(tick: float) -> str:
    """Format a tick. Large numbers become 12k or 1.5M, to fit beside a narrow plot."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(tick) >= max(size, SHORTENED):
            return f"{tick / size:.5g}{letter}"
    return f"{tick:.6g}"


def power_text(tick: float) -> str:
    """Format a power of ten: 1e-05, but 0.1 to 1000 in plain digits."""
    return f"{tick:g}" if 0.1 <= tick <= 1000 else f"{tick:.0e}"
