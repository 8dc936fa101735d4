from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from samecurve.data.sampler import Steps, _EpochOrder, _put_off, rows_at, rows_in_steps

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


# (rows, rows per step): equal, one apart, nearly a half, a half, a multiple, coprime, many steps, steps above the data
SHAPES = [(1, 1), (2, 1), (2, 2), (3, 2), (7, 7), (8, 7), (9, 8), (20, 11), (60, 59), (60, 60), (100, 51), (100, 64)]
SHAPES += [(100, 90), (60, 8), (64, 8), (97, 8), (1000, 7), (1001, 500), (1001, 501), (5, 7), (3, 20), (1, 4), (10, 25)]


def check_steps(read: np.ndarray, num_rows: int, bounds: list[int]) -> None:
    """Every epoch holds every row once; every step holds the rows equally often, or one more of some than of others."""
    for start in range(0, len(read) - num_rows + 1, num_rows):
        assert np.array_equal(np.sort(read[start : start + num_rows]), np.arange(num_rows)), start
    for first, end in itertools.pairwise(bounds):
        counts = np.bincount(read[first:end], minlength=num_rows)
        assert np.ptp(counts) <= 1, (first, end, counts)


@pytest.mark.parametrize(("num_rows", "step"), SHAPES)
def test_no_step_reads_a_row_twice(num_rows, step):
    seed = num_rows % 11
    positions = np.arange(-(-max(9 * num_rows, 30 * step) // step) * step)
    read = rows_in_steps(positions, num_rows, seed, Steps.of(step))
    check_steps(read, num_rows, list(range(0, len(positions) + 1, step)))
    some = np.random.default_rng(seed).permutation(positions)[:50]
    assert np.array_equal(rows_in_steps(some, num_rows, seed, Steps.of(step)), read[some])


@pytest.mark.full
def test_no_step_reads_a_row_twice_whatever_the_numbers():
    for num_rows, step in itertools.product(range(1, 36), repeat=2):
        positions = np.arange(-(-8 * num_rows // step) * step)
        read = rows_in_steps(positions, num_rows, step, Steps.of(step))
        check_steps(read, num_rows, list(range(0, len(positions) + 1, step)))


def test_the_same_in_many_epochs_far_away():
    """Going on there looks at few epochs before."""
    for num_rows, step in ((100, 64), (60, 59), (10**9, 512)):
        first = 10**9 // step * step
        positions = np.arange(first, first + 40 * step)
        read = rows_in_steps(positions, num_rows, 3, Steps.of(step)).reshape(-1, step)
        assert all(len(set(rows)) == step for rows in read.tolist())


def test_only_the_rows_that_an_epoch_begins_with_change_places():
    positions = np.arange(50 * 97)
    plain, read = rows_at(positions, 97, seed=4), rows_in_steps(positions, 97, 4, Steps.of(8))
    changed = np.flatnonzero(plain != read)
    assert len(changed) and changed.min() > 97 and (changed % 97 < 8).all()


def test_rows_that_are_put_off_by_hand():
    """Of the first three places 1 and 3 are unwanted: 5 and 2 come in their places, and 4 stays."""
    rows = np.array([1, 4, 3, 0, 5, 2, 6])
    assert _put_off(rows, 3, np.array([0, 1, 3])).tolist() == [5, 4, 2, 0, 1, 3, 6]


def test_no_order_is_lost_where_epochs_need_not_be_like_the_one_before():
    """Up to half of the rows per step: all. 90 of 100: the step that begins epoch 1 leaves 10 rows out, which are among
    the 20 that the epoch leaves for the next step, and so on: until 0 are left, the orders are one."""
    for step in (1, 33, 49, 50):
        assert [_EpochOrder(100, 0, Steps.of(step)).origin(epoch) for epoch in range(40)] == list(range(40))
    assert [_EpochOrder(100, 0, Steps.of(90)).origin(epoch) for epoch in range(12)] == 8 * [0] + [8] + 3 * [9]


@pytest.mark.parametrize("num_rows", [23, 60, 61, 100, 1000])
def test_another_number_of_rows_per_step_keeps_both(num_rows):
    """The sizes change 5 times, also within one epoch and at its first step."""
    sizes, history, start, bounds, read = [8, 13, 20, 8, 23, 5], {}, 0, [0], []
    for nth, size in enumerate(sizes):
        steps = Steps.of(size, start, history)
        num_steps = 2 * nth + 1 if nth != 2 else -(-num_rows // size)
        positions = np.arange(start, start + num_steps * size)
        read += rows_in_steps(positions, num_rows, 7, steps).tolist()
        bounds += [start + (step + 1) * size for step in range(num_steps)]
        start, history = bounds[-1], steps.history
    assert list(steps.history.values()) == sizes
    check_steps(np.array(read), num_rows, bounds)


@pytest.mark.parametrize("seed", range(30))
def test_any_sizes_in_any_sessions_that_are_asked_in_any_order(seed):
    """Also steps of nearly all rows, whose epochs repeat the order of the one before."""
    draw = random.Random(seed)
    num_rows = draw.choice([2, 5, 9, 34, 100, 1000])
    sizes = [draw.randint(1, num_rows) for _ in range(draw.randint(2, 4))]
    history, start, bounds, read = {}, 0, [0], []
    for size in sizes:
        steps = Steps.of(size, start, history)
        positions = np.arange(start, start + draw.randint(1, 6) * size)
        shuffled = np.array(draw.sample(positions.tolist(), len(positions)))
        found = rows_in_steps(shuffled, num_rows, seed, steps)
        read += found[np.argsort(shuffled)].tolist()
        bounds += range(start + size, int(positions[-1]) + 2, size)
        start, history = bounds[-1], steps.history
    check_steps(np.array(read), num_rows, bounds)
