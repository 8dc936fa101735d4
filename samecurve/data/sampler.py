"""The global sample order: a pure function of seed and position, with no list to shuffle.

The position counts the global rows consumed since the run began, so the order does not depend on the number of ranks,
and going on from any position costs nothing. Where epochs meet inside a step, the order also depends on which positions
that step reads (`Steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

# Eight rounds: four are a pseudo-random permutation for large domains (Luby and Rackoff, 1988), small ones need more.
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_HISTORY = "batch_size_from_"


def rows_at(positions: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
    """Row indices at the given positions: int64, the shape of `positions`, each in [0, num_rows).

    Every epoch (positions e * num_rows ... (e + 1) * num_rows - 1) visits every row once, in an order of its own. A
    Feistel network over the next power of four, applied again until the value falls below num_rows ("cycle walking",
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002), which is a bijection for every num_rows
    and takes less than four rounds of walking on average.
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
    """Which positions each step reads, from the position `since` on. Hashable.

    earlier: the steps before that, of a session with another number of rows per step; None where there was none.
    """

    since: int
    earlier: Bounds | None

    def bounds(self, position: int) -> tuple[int, int]:
        """(first, end) of the positions that the same step reads."""


@dataclass(frozen=True)
class Steps:
    """Steps of `size` rows each."""

    size: int
    since: int = 0
    earlier: Steps | None = None

    @classmethod
    def of(cls, size: int, start: int = 0, history: Mapping[str, int] | None = None) -> Steps:
        """start: the position that this session begins at. history: `history` of the session before, {} if unknown."""
        named = {key.removeprefix(_HISTORY): rows for key, rows in (history or {}).items() if key.startswith(_HISTORY)}
        steps = None
        # a checkpoint of before this was kept: steps of one row have the order that was read then
        first = [(0, 1 if start else size)]
        for since, rows in sorted((int(since), rows) for since, rows in named.items()) or first:
            steps = cls(rows, since, steps)
        if steps.size == size and (start - steps.since) % size == 0:
            return steps
        return cls(size, start, steps.earlier if steps.since == start else steps)

    @property
    def history(self) -> dict[str, int]:
        """For a checkpoint."""
        return (self.earlier.history if self.earlier else {}) | {f"{_HISTORY}{self.since}": self.size}

    def bounds(self, position: int) -> tuple[int, int]:
        first = position - (position - self.since) % self.size
        return first, first + self.size


def rows_in_steps(positions: np.ndarray, num_rows: int, seed: int, steps: Bounds) -> np.ndarray:
    """As `rows_at`, but no step reads a row twice; one of more than num_rows rows reads each about equally often.

    A step in which an epoch begins has rows of the epoch before. They are moved behind the step's end in the new epoch,
    in exchange for the next rows that the step does not have: nothing else is in another place than in `rows_at`. Where
    that is not possible, the epoch repeats the order of the one before, in which any num_rows neighbours are distinct.
    """
    epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), num_rows)
    order = _order(num_rows, seed, steps)
    found = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        found[epochs == epoch] = order.rows(epoch, places[epochs == epoch])
    return found


class _Order:
    """What `rows_in_steps` says, epoch by epoch."""

    def __init__(self, num_rows: int, seed: int, steps: Bounds):
        self._num_rows, self._seed, self._steps = num_rows, seed, steps
        self._first = -(-steps.since // num_rows)  # epochs that begin earlier have the order that they began with
        self._earlier = None if steps.earlier is None else _Order(num_rows, seed, steps.earlier)
        self._known = (self._first - 1, self._first - 1)  # an epoch and its origin

    def rows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The rows at some places of an epoch."""
        if epoch < self._first or self.origin(epoch) != epoch:
            return self._end(epoch, places)
        found, (before, after) = self._plain(epoch, places), self._around(epoch)
        moved = places < before + after
        if before and moved.any():
            last = self._end(epoch - 1, np.arange(self._num_rows - before, self._num_rows))
            begin = _put_off(self._plain(epoch, np.arange(before + after)), after, last)
            found[moved] = begin[places[moved]]
        return found

    def origin(self, epoch: int) -> int:
        """The epoch whose order this one has.

        Another one only where a step takes more than half of the rows: one that began about
        num_rows / (num_rows - rows of a step) epochs before, at most.
        """
        known, origin = self._known
        nth = epoch
        while nth >= self._first and nth != known and self._repeats(nth):
            nth -= 1
        found = origin if nth == known else nth
        self._known = (epoch, found)  # the epochs after it need not look further back
        return found

    def _repeats(self, epoch: int) -> bool:
        """Whether the steps at both ends of the epoch need more rows than there are."""
        before, after = self._around(epoch)
        return before > 0 and before + min(after, self._num_rows) + self._around(epoch + 1)[0] > self._num_rows

    def _around(self, epoch: int) -> tuple[int, int]:
        """How many rows the step in which the epoch begins takes before that, and from there on."""
        start = epoch * self._num_rows
        first, end = self._steps.bounds(start)
        return start - first, end - start

    def _end(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """As `rows`, for places at which nothing was moved."""
        origin = epoch if epoch < self._first else self.origin(epoch)
        return self._earlier.rows(origin, places) if origin < self._first else self._plain(origin, places)

    def _plain(self, epoch: int, places: np.ndarray) -> np.ndarray:
        return rows_at(epoch * self._num_rows + places, self._num_rows, self._seed)


_order = lru_cache(maxsize=256)(_Order)


def _put_off(rows: np.ndarray, num_first: int, unwanted: np.ndarray) -> np.ndarray:
    """The rows, with those that are unwanted among the first ones exchanged for the next that are not."""
    marked = np.isin(rows, unwanted)
    wrong = np.flatnonzero(marked[:num_first])
    right = num_first + np.flatnonzero(~marked[num_first:])[: len(wrong)]
    rows[wrong], rows[right] = rows[right], rows[wrong]
    return rows


def uniform(positions: np.ndarray, width: int, seed: int, draw: int) -> np.ndarray:
    """float64 (len(positions), width) in [0, 1): what is random in the rows that are read at these positions.

    draw: a small number; another one gives independent values.
    """
    start = np.array([(seed * _GOLDEN + draw + 1) & _MASK], dtype=np.uint64)
    keys = _mix(_mix(start) + np.asarray(positions, dtype=np.uint64) * np.uint64(_GOLDEN))
    steps = np.arange(width, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_mix(keys[:, None] + steps) >> np.uint64(11)) * 2.0**-53


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: np.uint64) -> np.ndarray:
    """A bijection of [0, 4 ** half_bits), one key per value."""
    low_half = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & low_half
    for round_number in range(1, _ROUNDS + 1):
        round_keys = keys + np.uint64(round_number * _GOLDEN & _MASK)
        left, right = right, left ^ (_mix(round_keys ^ right) & low_half)
    return left << half_bits | right


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood, OOPSLA 2014): every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
