"""The values of a flattened tensor that a rank holds, and what two such regions have in common. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Region(NamedTuple):
    """`count` runs of `length` values of a flattened tensor, `stride` apart, the first from `start` on.

    One run is a contiguous range: a whole tensor, some rows, or a fragment of a flat group. Several runs are a cut in
    columns: of a (rows, columns) weight that tensor parallelism cuts in dimension 1, a rank holds `rows` runs,
    `columns` apart. A rank keeps the values of its runs one after the other.
    """

    start: int
    length: int
    count: int = 1
    stride: int = 0

    @property
    def numel(self) -> int:
        return self.length * self.count

    def part(self, values: range) -> Region:
        """Return the region of the values with these numbers, counted from 0; of several runs, only whole ones."""
        if self.count == 1:
            return Region(self.start + values.start, len(values))
        first, rest = divmod(values.start, self.length)
        count, more = divmod(len(values), self.length)
        assert not rest and not more, f"{values} does not consist of whole runs of {self.length}"
        start = self.start + first * self.stride
        return Region(start, self.length, count, self.stride) if count > 1 else Region(start, self.length * count)

    def split(self, index: int, count: int) -> range:
        """Return which values are the index-th of `count` nearly equal parts, in whole runs if there are several."""
        units, size = (self.length, 1) if self.count == 1 else (self.count, self.length)
        return range(units * index // count * size, units * (index + 1) // count * size)


class Overlap(NamedTuple):
    """`rows` x `columns` values that two regions share.

    Row i begins at value `first + i * first_pitch` of the first region, and at `second + i * second_pitch` of the
    second.
    """

    rows: int
    columns: int
    first: int
    first_pitch: int
    second: int
    second_pitch: int


def overlaps(first: Region, second: Region) -> Iterator[Overlap]:
    """Yield what two regions of one tensor share, in a few rectangles for any number of runs of equal stride."""
    if first.count > 1 < second.count and first.stride != second.stride:  # cuts of two kinds: run by run
        for run in range(first.count):
            for shared in overlaps(Region(first.start + run * first.stride, first.length), second):
                yield shared._replace(first=shared.first + run * first.length)
        return
    # on a grid as wide as the stride, a region with several runs is one rectangle, and a range at most three
    width = first.stride or second.stride or max(first.start + first.length, second.start + second.length, 1)
    for mine in _rectangles(first, width):
        for other in _rectangles(second, width):
            row, column = max(mine.row, other.row), max(mine.column, other.column)
            rows = min(mine.row + mine.rows, other.row + other.rows) - row
            columns = min(mine.column + mine.columns, other.column + other.columns) - column
            if rows > 0 < columns:
                places = (mine.offset_of(row, column), mine.columns, other.offset_of(row, column), other.columns)
                yield Overlap(rows, columns, *places)


class _Rectangle(NamedTuple):
    """Part of a region on a grid. offset: number of its first value among the region's values."""

    offset: int
    row: int
    rows: int
    column: int
    columns: int

    def offset_of(self, row: int, column: int) -> int:
        return self.offset + (row - self.row) * self.columns + column - self.column


def _rectangles(region: Region, width: int) -> Iterator[_Rectangle]:
    row, column = divmod(region.start, width)
    if region.count > 1:
        yield _Rectangle(0, row, region.count, column, region.length)
        return
    offset = 0
    if column:
        offset = min(width - column, region.length)
        yield _Rectangle(0, row, 1, column, offset)
        row += 1
    rows, rest = divmod(region.length - offset, width)
    if rows:
        yield _Rectangle(offset, row, rows, 0, width)
    if rest:
        yield _Rectangle(offset + rows * width, row + rows, 1, 0, rest)
