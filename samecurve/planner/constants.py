"""Numbers of machines and formulas with their units and origins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MEASURED, DATA_SHEET, ASSUMED = "measured elsewhere", "data sheet", "assumed"
FITTED, FILE, CALIBRATED = "fitted", "cluster file", "calibration"
ORIGINS = (MEASURED, DATA_SHEET, ASSUMED, FITTED, FILE, CALIBRATED)
HARDWARE_JSON = "samecurve/planner/hardware.json"


class Constant(float):
    """A number that knows its origin; the result of arithmetic with it is a plain float.

    Attributes:
        unit: such as GB/s, or what a share or a factor is of.
        origin: one of ORIGINS.
        source: what the origin is in detail: a file and its line, a paper, the machine of a measurement.
    """

    __slots__ = ("origin", "source", "unit")

    def __new__(cls, value: float, unit: str, origin: str, source: str) -> Constant:
        assert unit and source and origin in ORIGINS
        made = super().__new__(cls, value)
        made.unit, made.origin, made.source = unit, origin, source
        return made

    def __getnewargs__(self) -> tuple:
        """Return the arguments with which a copy is made."""
        return float(self), self.unit, self.origin, self.source


def plain(value: float) -> float:
    """Return a number as YAML shows it best: without its origin, whole where it is, without errors of rounding."""
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded


def flat(name: str, value: Any) -> Iterator[tuple[str, Constant]]:
    """Generate the constants in nested mappings and tuples, with dotted names. What is absent, such as 0, has none."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat(f"{name}.{key or 'others'}", each)
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from flat(f"{name}.{index}", each)
    elif isinstance(value, Constant):
        yield name, value
