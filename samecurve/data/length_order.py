"""Global sample order in which all rows of a step have nearly the same length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from samecurve.data.sampler import rows_at

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
            step_size: rows per step.
            seed: seed of the random order.
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
            # the tail of the epoch before is in the same step, which must not read a row twice
            head = self._head(_without(rows, self._tail(epoch - 1)), epoch)
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

    def _head(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        """Choose, of rows sorted by length, those that complete the last step of the epoch before.

        They are the longest rows that are no longer than the longest row already in that step.
        """
        longest = self.sizes[self._tail(epoch - 1)].max()
        num_rows = self._layout(epoch).head
        end = max(num_rows, int(np.searchsorted(self.sizes[rows], longest, side="right")))
        return rows[end - num_rows : end]

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
