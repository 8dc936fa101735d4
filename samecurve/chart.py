"""Loss curves as a small SVG, written by hand: one panel with the curves, one with how far each is from the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT = 900, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 34, 44
# Okabe and Ito's palette for colour-blind readers, then darker forms of it
COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#0072b2", "#cc79a7", "#8c6100")
COLOURS += ("#1f6f99", "#00593f", "#7a3500", "#6b3f57")
LOWEST_POWER, HIGHEST_POWER = -10, -2  # of ten: what the lower panel shows
AXIS = "#666666"


@dataclass(frozen=True)
class Curve:
    """values: one per step, from step 1 on; None where there was none."""

    label: str
    values: Sequence[float | None]


def relative_differences(values: Sequence[float | None], reference: Sequence[float | None]) -> list[float | None]:
    """|value - reference| / |reference| per step; None where either is missing. 0 / 0 is 0."""
    return [_relative(value, expected) for value, expected in zip(values, reference, strict=False)]


def _relative(value: float | None, expected: float | None) -> float | None:
    if value is None or expected is None:
        return None
    if value == expected:
        return 0.0
    return abs(value - expected) / abs(expected) if expected else math.inf


def chart(curves: Sequence[Curve], title: str, tolerance: float) -> str:
    """The SVG's text. The first curve is the reference of the lower panel; `tolerance` is its dashed line."""
    steps = max(len(curve.values) for curve in curves)
    known = [value for curve in curves for value in curve.values if value is not None]
    loss = _Panel(0, steps, linear_ticks(min(known), max(known)))
    reference = curves[0].values
    distances = [Curve(curve.label, relative_differences(curve.values, reference)) for curve in curves[1:]]
    distance = _Panel(PANEL_HEIGHT, steps, powers_of_ten(), logarithmic=True)
    height = 2 * PANEL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *loss.frame(f"{title}: loss"),
        *(loss.line(curve.values, index, _turns(index, len(curves))) for index, curve in enumerate(curves)),
        *_legend(curves),
        *distance.frame(f"|loss / loss of {curves[0].label} - 1|"),
        distance.rule(tolerance),
        *(distance.line(curve.values, index + 1, 'stroke-width="1.5"') for index, curve in enumerate(distances)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Panel:
    """A plot area from `top` on. ticks: of the vertical axis, which they span."""

    def __init__(self, top: int, steps: int, ticks: Sequence[float], logarithmic: bool = False):
        self._top, self._steps, self._ticks = top, steps, ticks
        self._scale: Callable[[float], float] = math.log10 if logarithmic else float
        self._text = (lambda tick: f"{tick:.0e}") if logarithmic else (lambda tick: f"{tick:.6g}")

    def frame(self, title: str) -> list[str]:
        left, right, bottom = LEFT, WIDTH - RIGHT, self._top + PANEL_HEIGHT - BOTTOM
        parts = [f'<text x="{left}" y="{self._top + 20}" font-weight="bold">{escape(title)}</text>']
        for tick in self._ticks:
            y = self.y(tick)
            parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
            label = escape(self._text(tick))
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{AXIS}">{label}</text>')
        for step in step_ticks(self._steps):
            x = self.x(step)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="{AXIS}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" fill="{AXIS}">{step}</text>')
        middle = (left + right) / 2
        parts.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle" fill="{AXIS}">step</text>')
        parts.append(f'<path d="M{left} {self._top + TOP}V{bottom}H{right}" fill="none" stroke="{AXIS}"/>')
        return parts

    def line(self, values: Sequence[float | None], index: int, style: str) -> str:
        points = [
            f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in enumerate(values, 1) if value is not None
        ]
        shape = f'points="{" ".join(points)}" fill="none" stroke-linejoin="round"'
        return f'<polyline {shape} stroke="{_colour(index)}" {style}/>'

    def rule(self, value: float) -> str:
        y = self.y(value)
        line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="red" stroke-dasharray="6 4"/>'
        return f'{line}<text x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}" fill="red">tolerance {value:g}</text>'

    def x(self, step: int) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * (step - 1) / max(self._steps - 1, 1)

    def y(self, value: float) -> float:
        """What is outside the ticks (a difference of exactly 0) is drawn on the edge."""
        low, high = self._scale(self._ticks[0]), self._scale(self._ticks[-1])
        share = (self._scale(min(max(value, self._ticks[0]), self._ticks[-1])) - low) / (high - low)
        return self._top + PANEL_HEIGHT - BOTTOM - share * (PANEL_HEIGHT - BOTTOM - TOP)


def _turns(index: int, count: int) -> str:
    """Dashes that take turns, so that curves on top of each other are all seen."""
    dash = 9
    return f'stroke-width="3" stroke-dasharray="{dash} {dash * (count - 1)}" stroke-dashoffset="{-dash * index}"'


def _legend(curves: Sequence[Curve]) -> list[str]:
    parts = []
    for index, curve in enumerate(curves):
        x, y = WIDTH - RIGHT + 14, TOP + 8 + 18 * index
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{_colour(index)}" stroke-width="4"/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{escape(curve.label)}</text>')
    return parts


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that enclose [low, high]; at most about seven."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    unit = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= 6)
    first, last = math.floor(low / unit), math.ceil(high / unit)
    return [index * unit for index in range(first, max(last, first + 1) + 1)]


def powers_of_ten() -> list[float]:
    return [10.0**power for power in range(LOWEST_POWER, HIGHEST_POWER + 1)]


def step_ticks(steps: int) -> list[int]:
    """1 and round steps."""
    return [1, *(round(tick) for tick in linear_ticks(0, steps) if 1 < tick <= steps and tick == round(tick))]
