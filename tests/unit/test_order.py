from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from samecurve.order import rows_at

SIZES = [1, 2, 3, 4, 5, 7, 16, 17, 97, 255, 256, 257, 1000, 4095, 4097, 65_537]


@pytest.mark.parametrize("num_rows", SIZES)
def test_every_epoch_visits_every_row_once(num_rows):
    for epoch in range(3):
        rows = rows_at(np.arange(epoch * num_rows, (epoch + 1) * num_rows), num_rows, seed=5)
        assert np.array_equal(np.sort(rows), np.arange(num_rows))


def test_order_is_pinned():
    """A change of these numbers changes what every run reads, and breaks going on from an older one."""
    assert rows_at(np.arange(12), 10, seed=0).tolist() == [1, 3, 9, 4, 5, 2, 7, 6, 0, 8, 9, 4]
    assert rows_at(np.array([0, 10**9 - 1, 10**12]), 10**9, seed=1).tolist() == [130944189, 138770205, 260999469]


def test_a_row_depends_on_its_position_alone():
    positions = np.arange(500).reshape(20, 25)
    whole = rows_at(positions, 101, seed=3)
    assert whole.shape == (20, 25)
    for place in [(0, 0), (7, 3), (19, 24)]:
        assert rows_at(positions[place], 101, seed=3) == whole[place]


def test_a_billion_rows_at_arbitrary_positions():
    positions = np.arange(0, 10**9, 9_973)
    rows = rows_at(positions, 10**9, seed=2)
    assert len(np.unique(rows)) == len(positions)
    assert rows.min() >= 0 and rows.max() < 10**9
    # Uniform: 100,271 rows in ten bins of 10,027 +- 95; five sigma.
    assert np.abs(np.bincount(rows // 10**8, minlength=10) - len(rows) / 10).max() < 475


def test_seeds_and_epochs_give_different_orders():
    orders = {
        tuple(rows_at(np.arange(e * 50, e * 50 + 50), 50, seed)) for seed, e in itertools.product(range(20), repeat=2)
    }
    assert len(orders) == 400


@pytest.mark.parametrize("seed", [-1, 2**64, 2**100])
def test_any_whole_number_is_a_seed(seed):
    assert sorted(rows_at(np.arange(9), 9, seed)) == list(range(9))


def test_all_orders_of_three_rows_are_about_equally_frequent():
    rows = rows_at(np.arange(3 * 6000), 3, seed=0).reshape(-1, 3)
    counts = Counter(map(tuple, rows.tolist()))
    assert len(counts) == 6
    # 1000 +- 29 each; five sigma.
    assert all(abs(count - 1000) < 145 for count in counts.values()), counts


def test_neighbours_are_torn_apart():
    rows = rows_at(np.arange(10_000), 10_000, seed=0)
    # Two random neighbours differ by a third of the range on average.
    assert np.abs(np.diff(rows)).mean() == pytest.approx(10_000 / 3, rel=0.03)
