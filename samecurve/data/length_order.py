"""The global sample order in which the rows of a step are of nearly the same length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from samecurve.data.sampler import rows_at

_MOST_STEPS = 32  # of a group


class LengthOrder:
    """Every row once per epoch and none twice in a step, as a function of seed and position.

    The steps of an epoch are cut into groups of up to _MOST_STEPS, at least two groups, so that a row meets others in
    each epoch. The rows of a group, which the random order gives, are sorted by length and cut into steps, and the
    steps are put into a random order again. What an epoch leaves for the step that it shares with the next one is of
    one length, too, and the next epoch adds rows of about that length.
    """

    def __init__(self, sizes: np.ndarray, step_size: int, seed: int):
        """sizes: (rows,) their lengths, at least two steps' rows."""
        assert len(sizes) >= 2 * step_size
        self.sizes, self.step_size, self.seed = sizes, step_size, seed

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """As order.rows_at."""
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), len(self.sizes))
        found = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            starts = self._layout(epoch).starts
            groups = np.where(epochs == epoch, np.searchsorted(starts, places, side="right") - 1, -1)
            for group in np.unique(groups[groups >= 0]).tolist():
                found[groups == group] = self._group(epoch, group)[places[groups == group] - starts[group]]
        return found

    def _group(self, epoch: int, group: int) -> np.ndarray:
        """A group's rows in the order in which they are read."""
        layout, rows = self._layout(epoch), self._by_length(epoch, group)
        head = tail = rows[:0]
        if group == layout.num_groups - 1:
            tail = self._tail(epoch)
            rows = _without(rows, tail)
        if group == 0 and layout.head:
            head = self._head(_without(rows, self._tail(epoch - 1)), epoch)
            rows = _without(rows, head)
        steps = rows.reshape(-1, self.step_size)
        nth = np.arange(len(steps)) + (epoch * layout.num_groups + group) * len(steps)
        return np.concatenate([head, steps[rows_at(nth, len(steps), self.seed)].ravel(), tail])

    def _tail(self, epoch: int) -> np.ndarray:
        """The last rows of an epoch, which fill no step: a function of this epoch alone, so that no chain arises."""
        layout = self._layout(epoch)
        rows = self._by_length(epoch, layout.num_groups - 1)
        first = int(rows_at(np.array(epoch), len(rows) - layout.tail + 1, self.seed))
        return rows[first : first + layout.tail]

    def _head(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        """Of these rows, which are sorted, the longest that are no longer than those whose step they fill."""
        longest = self.sizes[self._tail(epoch - 1)].max()
        num_rows = self._layout(epoch).head
        end = max(num_rows, int(np.searchsorted(self.sizes[rows], longest, side="right")))
        return rows[end - num_rows : end]

    def _by_length(self, epoch: int, group: int) -> np.ndarray:
        starts = self._layout(epoch).starts
        places = epoch * len(self.sizes) + np.arange(starts[group], starts[group + 1])
        rows = rows_at(places, len(self.sizes), self.seed)
        return rows[np.argsort(self.sizes[rows], kind="stable")]

    def _layout(self, epoch: int) -> _Layout:
        num_rows = len(self.sizes)
        return _layout(num_rows, self.step_size, -epoch * num_rows % self.step_size)


@dataclass(frozen=True)
class _Layout:
    """How an epoch lies in the steps.

    head, tail: how many rows it gives to a step that begins in the epoch before, and to one that ends in the next.
    starts: the first place of each group, and the number of rows.
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
