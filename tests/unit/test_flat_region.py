"""Regions of a flattened tensor against brute force over its values."""

from __future__ import annotations

import random

import pytest

from samecurve.interfaces.region import Region, overlaps


def values_of(region: Region) -> list[int]:
    return [region.start + run * region.stride + i for run in range(region.count) for i in range(region.length)]


def random_region(rng: random.Random, rows: int, columns: int) -> Region:
    kind = rng.choice(["range", "columns", "columns", "packed"])
    if kind == "range":
        start, stop = sorted(rng.sample(range(rows * columns + 1), 2))
        return Region(start, stop - start)
    row, last = sorted(rng.sample(range(rows + 1), 2))
    column, end = sorted(rng.sample(range(columns + 1), 2))
    if last - row == 1:
        return Region(row * columns + column, end - column)
    if kind == "packed" and rows % 4 == 0:  # two halves, of which each rank holds a part
        return Region(rng.randrange(2) * columns, columns, rows // 2, 2 * columns)
    return Region(row * columns + column, end - column, last - row, columns)


@pytest.mark.parametrize("seed", range(30))
def test_overlaps_are_what_both_have(seed):
    rng = random.Random(seed)
    rows, columns = rng.choice([4, 8, 7]), rng.randint(2, 9)
    first, second = (random_region(rng, rows, columns) for _ in range(2))
    mine, other, seen = values_of(first), values_of(second), []
    for shared in overlaps(first, second):
        for row in range(shared.rows):
            for column in range(shared.columns):
                value = mine[shared.first + row * shared.first_pitch + column]
                assert value == other[shared.second + row * shared.second_pitch + column]
                seen.append(value)
    assert sorted(seen) == sorted(set(mine) & set(other)) and len(set(seen)) == len(seen)


def test_a_column_cut_is_one_rectangle():
    assert len(list(overlaps(Region(0, 2, 1000, 8), Region(1, 4, 1000, 8)))) == 1
    assert len(list(overlaps(Region(0, 2, 1000, 8), Region(1, 7000)))) == 3


@pytest.mark.parametrize("region", [Region(5, 17), Region(3, 4, 6, 10), Region(0, 3, 2, 8)])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_nearly_equal_and_leave_nothing_out(region, count):
    parts = [region.part(region.split(index, count)) for index in range(count)]
    assert [value for part in parts for value in values_of(part)] == values_of(region)
    unit = 1 if region.count == 1 else region.length
    sizes = [part.numel for part in parts]
    assert max(sizes) - min(sizes) <= unit
