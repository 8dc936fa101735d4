"""Lengths of time ranges that overlap."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def covered(intervals: Iterable[Interval], start: float, end: float) -> float:
    """Measure the part of a time range that is covered by intervals, which may overlap."""
    covered, reached = 0.0, start
    for first, last in sorted(intervals):
        covered += max(0.0, min(last, end) - max(first, reached))
        reached = max(reached, last)
    return covered
