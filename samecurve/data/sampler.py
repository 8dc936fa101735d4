"""Global sample order: a pure function of seed and position, without a shuffled list.

The position counts the rows that all ranks have read since the start of the run. So the order does not depend on the
number of ranks, and resuming at any position costs nothing. Where a step spans two epochs, the order also depends on
the positions that this step reads (`Steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

# Eight rounds: four are a pseudo-random permutation for large domains (Luby and Rackoff, 1988), small ones need more.
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: SplitMix64's increment
_MASK = (1 << 64) - 1
_HISTORY = "batch_size_from_"  # prefix of keys, because a checkpoint has them in one dict with those of the rows


def rows_at(positions: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Return the row indices at the given positions.

    Every epoch (positions e * num_rows ... (e + 1) * num_rows - 1) visits every row once, in its own order. The order
    is a Feistel network over the next power of four, applied again until the value falls below num_rows ("cycle
    walking", Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). This is a bijection for every
    num_rows and takes less than four rounds of walking on average.

    Args:
        positions: global positions, of any shape.

    Returns:
        int64 of the shape of `positions`, each in [0, num_rows).
    """
    shape = np.shape(positions)
    epochs, places = np.divmod(np.asarray(positions, dtype=np.uint64).ravel(), np.uint64(num_rows))
    keys = _mix(_mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64)) + epochs * np.uint64(_GOLDEN))
    half_bits = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    rows = _feistel(places, keys, half_bits)
    while (outside := rows >= num_rows).any():
        rows[outside] = _feistel(rows[outside], keys[outside], half_bits)
    return rows.astype(np.int64).reshape(shape)


class Bounds(Protocol):
    """Positions that each step reads. Hashable."""

    @property
    def since(self) -> int:
        """First position that these bounds are valid for."""
        ...

    @property
    def earlier(self) -> Bounds | None:
        """Bounds of the steps before `since`, of a session with another number of rows per step; None without one."""
        ...

    def bounds(self, position: int) -> tuple[int, int]:
        """Return (first, end) of the positions that are read in the same step as `position`."""
        ...


@dataclass(frozen=True)
class Steps:
    """Steps of `size` rows each."""

    size: int
    since: int = 0
    earlier: Steps | None = None

    @classmethod
    def of(cls, size: int, start: int = 0, history: Mapping[str, int] | None = None) -> Steps:
        """Return the steps of a session.

        Args:
            start: position at which the session begins.
            history: `history` of the session before, from its checkpoint; None for a new run.
        """
        steps = cls(size)
        sizes = {int(key.removeprefix(_HISTORY)): n for key, n in (history or {}).items() if key.startswith(_HISTORY)}
        for index, (since, rows) in enumerate(sorted(sizes.items())):
            steps = cls(rows, since, steps if index else None)
        if steps.size == size and (start - steps.since) % size == 0:
            return steps
        # a session that began at `start` has read nothing, and is left out
        return cls(size, start, steps.earlier if steps.since == start else steps)

    @property
    def history(self) -> dict[str, int]:
        """Sizes of the steps by their first position, for a checkpoint."""
        return (self.earlier.history if self.earlier else {}) | {f"{_HISTORY}{self.since}": self.size}

    def bounds(self, position: int) -> tuple[int, int]:
        first = position - (position - self.since) % self.size
        return first, first + self.size


def rows_in_steps(positions: np.ndarray, num_rows: int, seed: int, steps: Bounds) -> np.ndarray:
    """Return the row indices at the given positions, as `rows_at`, but so that no step reads a row twice.

    A step of more than num_rows rows reads each row about equally often.

    A step in which an epoch begins also has rows of the epoch before. In the new epoch these rows are moved behind the
    end of the step, in exchange for the next rows that the step does not have. All other rows stay where `rows_at` has
    them. If that is not possible, the epoch repeats the order of the one before, so that any num_rows consecutive rows
    are distinct.

    Args:
        positions: global positions, of any shape.
        steps: positions that each step reads.
    """
    epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), num_rows)
    order = _order(num_rows, seed, steps)
    rows = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        rows[epochs == epoch] = order.rows(epoch, places[epochs == epoch])
    return rows


class _EpochOrder:
    """Order of `rows_in_steps`, by epoch."""

    def __init__(self, num_rows: int, seed: int, steps: Bounds):
        self._num_rows, self._seed, self._steps = num_rows, seed, steps
        self._first = -(-steps.since // num_rows)  # epochs that begin earlier keep the order of the earlier steps
        self._earlier = None if steps.earlier is None else _EpochOrder(num_rows, seed, steps.earlier)
        self._known = (self._first - 1, self._first - 1)  # an epoch and its origin

    def rows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the rows at the given places of an epoch."""
        if epoch < self._first or self.origin(epoch) != epoch:
            return self._end(epoch, places)
        rows, (before, after) = self._plain(epoch, places), self._around(epoch)
        moved = places < before + after
        if before and moved.any():
            last = self._end(epoch - 1, np.arange(self._num_rows - before, self._num_rows))
            begin = _put_off(self._plain(epoch, np.arange(before + after)), after, last)
            rows[moved] = begin[places[moved]]
        return rows

    def origin(self, epoch: int) -> int:
        """Return the epoch whose order this epoch has.

        It is an earlier epoch only if a step reads more than half of the rows: one that began at most about
        num_rows / (num_rows - rows of a step) epochs before.
        """
        known, origin = self._known
        nth = epoch
        while nth >= self._first and nth != known:
            before, after = self._around(nth)
            # the steps at both ends of the epoch need no more rows than there are
            if not before or before + min(after, self._num_rows) + self._around(nth + 1)[0] <= self._num_rows:
                break
            nth -= 1
        root = origin if nth == known else nth
        self._known = (epoch, root)  # later epochs need not look further back
        return root

    def _around(self, epoch: int) -> tuple[int, int]:
        """Return the numbers of rows before and after the epoch's start within the step that contains it."""
        start = epoch * self._num_rows
        first, end = self._steps.bounds(start)
        return start - first, end - start

    def _end(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the rows at places where nothing was moved."""
        origin = epoch if epoch < self._first else self.origin(epoch)
        if origin >= self._first:
            return self._plain(origin, places)
        assert self._earlier is not None  # the steps of the first session begin at position 0, so `_first` is 0
        return self._earlier.rows(origin, places)

    def _plain(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return rows_at(epoch * self._num_rows + places, self._num_rows, self._seed)


# kept from call to call, so that `origin` seldom goes back further than one epoch
_order = lru_cache(maxsize=256)(_EpochOrder)


def _put_off(rows: np.ndarray, num_first: int, unwanted: np.ndarray) -> np.ndarray:
    """Exchange the unwanted rows among the first `num_first` for the next rows that are not unwanted. In place."""
    marked = np.isin(rows, unwanted)
    wrong = np.flatnonzero(marked[:num_first])
    right = num_first + np.flatnonzero(~marked[num_first:])[: len(wrong)]
    rows[wrong], rows[right] = rows[right], rows[wrong]
    return rows


def uniform(positions: np.ndarray, width: int, seed: int, draw: int) -> np.ndarray:
    """Return uniform random numbers for the rows read at n global positions: (n, width) float64 in [0, 1).

    `draw` is a small integer; different draws are independent.
    """
    start = np.array([(seed * _GOLDEN + draw + 1) & _MASK], dtype=np.uint64)
    keys = _mix(_mix(start) + np.asarray(positions, dtype=np.uint64) * np.uint64(_GOLDEN))
    steps = np.arange(width, dtype=np.uint64) * np.uint64(_GOLDEN)
    # the upper 53 bits, as many as a float64 holds exactly
    return (_mix(keys[:, None] + steps) >> np.uint64(11)) * 2.0**-53


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: np.uint64) -> np.ndarray:
    """Map [0, 4 ** half_bits) onto itself by a Feistel network, with one key per value."""
    low_half = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & low_half
    for round_number in range(1, _ROUNDS + 1):
        round_keys = keys + np.uint64(round_number * _GOLDEN & _MASK)
        left, right = right, left ^ (_mix(round_keys ^ right) & low_half)
    return left << half_bits | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's output function, in which every input bit affects every output bit.

    Source: Steele, Lea and Flood, OOPSLA 2014.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_MOST_STEPS = 32  # largest number of steps in a group


class LengthOrder:
    """Sample order by length: a pure function of seed and position.

    Reads every row once per epoch and none twice in a step. The whole steps of an epoch are divided into groups of up
    to _MOST_STEPS steps, and into at least two groups (unless there is only one such step), so that a row shares its
    steps with other rows in each epoch. The random order assigns rows to groups. Within a group the rows are sorted by
    length and cut into steps, and the steps are shuffled. The last rows of an epoch, which fill no whole step, have
    nearly the same length too, and the next epoch completes their step with rows of about that length.
    """

    def __init__(self, sizes: np.ndarray, step_size: int, seed: int):
        """Create the order.

        Args:
            sizes: (rows,), length of each row; at least 2 * step_size rows.
        """
        assert len(sizes) >= 2 * step_size
        self.sizes, self.step_size, self.seed = sizes, step_size, seed

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the rows read at the given positions, see `sampler.rows_at`."""
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), len(self.sizes))
        rows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            starts = self._layout(epoch).starts
            groups = np.where(epochs == epoch, np.searchsorted(starts, places, side="right") - 1, -1)
            for group in np.unique(groups[groups >= 0]).tolist():
                rows[groups == group] = self._group(epoch, group)[places[groups == group] - starts[group]]
        return rows

    def _group(self, epoch: int, group: int) -> np.ndarray:
        """Return a group's rows in reading order."""
        layout, rows = self._layout(epoch), self._by_length(epoch, group)
        head = tail = rows[:0]
        if group == layout.num_groups - 1:
            tail = self._tail(epoch)
            rows = _without(rows, tail)
        if group == 0 and layout.head:
            # the tail of the epoch before is in the same step, which must not read a row twice; it is completed by the
            # longest rows that are no longer than the longest one there
            before = self._tail(epoch - 1)
            others, longest = _without(rows, before), self.sizes[before].max()
            end = max(layout.head, int(np.searchsorted(self.sizes[others], longest, side="right")))
            head = others[end - layout.head : end]
            rows = _without(rows, head)
        steps = rows.reshape(-1, self.step_size)
        # for rows_at, each group of each epoch is an epoch of its own, with an order of its own
        nth = np.arange(len(steps)) + (epoch * layout.num_groups + group) * len(steps)
        return np.concatenate([head, steps[rows_at(nth, len(steps), self.seed)].ravel(), tail])

    def _tail(self, epoch: int) -> np.ndarray:
        """Return the last rows of an epoch, which fill no whole step."""
        # A function of this epoch alone, so that no epoch depends on all those before it.
        layout = self._layout(epoch)
        rows = self._by_length(epoch, layout.num_groups - 1)
        first = int(rows_at(np.array(epoch), len(rows) - layout.tail + 1, self.seed))
        return rows[first : first + layout.tail]

    def _by_length(self, epoch: int, group: int) -> np.ndarray:
        starts = self._layout(epoch).starts
        places = epoch * len(self.sizes) + np.arange(starts[group], starts[group + 1])
        rows = rows_at(places, len(self.sizes), self.seed)
        # stable, because otherwise the order of equal sizes depends on the CPU (numpy issue 24064)
        return rows[np.argsort(self.sizes[rows], kind="stable")]

    def _layout(self, epoch: int) -> _Layout:
        num_rows = len(self.sizes)
        return _layout(num_rows, self.step_size, -epoch * num_rows % self.step_size)


@dataclass(frozen=True)
class _Layout:
    """Alignment of an epoch with the steps.

    Attributes:
        head: number of rows in a step that begins in the epoch before.
        tail: number of rows in a step that ends in the next epoch.
        starts: (num_groups + 1,), first place of each group within the epoch, then the number of rows.
    """

    head: int
    tail: int
    starts: np.ndarray

    @property
    def num_groups(self) -> int:
        return len(self.starts) - 1


def _without(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    return rows[~np.isin(rows, others)]


@lru_cache(maxsize=16)
def _layout(num_rows: int, step_size: int, head: int) -> _Layout:
    tail = (num_rows - head) % step_size
    num_steps = (num_rows - head - tail) // step_size
    num_groups = -(-num_steps // min(_MOST_STEPS, -(-num_steps // 2)))
    inner = head + np.arange(1, num_groups, dtype=np.int64) * num_steps // num_groups * step_size
    return _Layout(head, tail, np.concatenate([[0], inner, [num_rows]]))
