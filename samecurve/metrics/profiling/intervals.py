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


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that overlap or touch; sorted."""
    found: list[Interval] = []
    for first, last in sorted(intervals):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found
