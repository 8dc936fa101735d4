"""Rows of text that is tokenised while training goes on, block by block."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

from samecurve.data.datasets.base import Rows
from samecurve.data.datasets.mixture import SplitRows
from samecurve.data.sampler import Bounds, Steps
from samecurve.errors import DataError
from samecurve.storage.cache import digest

# Ranks and their loaders are less than this many steps apart: a rank is at most one step ahead of another, and a loader
# a few steps ahead of its rank.
_KEPT_STEPS = 16


class StreamRows(SplitRows):
    """A row's index is the global position that it is read at: one block after the other, each shuffled in itself.

    How many rows a block has is known when it is tokenised. So a position is found by going on from an anchor: a block
    and the position that it begins at. A checkpoint holds the one before its own position, so that going on takes one
    block, wherever that is. Blocks are made in the background, one ahead.
    """

    def __init__(
        self,
        make: Callable[[int], Rows],
        drop: Callable[[int], None],
        blocks_per_epoch: int,
        fingerprint: str,
        facts: dict[str, int],
    ):
        """make: a block's rows. drop: those before a block are not needed any more, but the first one; called again
        with higher numbers. facts: what is known of the data, for the header.
        """
        first = make(0)
        self.sequence_length = first.sequence_length
        self.fingerprint = digest(type(self).__name__, type(first).__name__, fingerprint, first.sequence_length)
        order = "the same rows in every epoch" if blocks_per_epoch == 1 else "even blocks, neighbours share no piece"
        self.fingerprint = digest(self.fingerprint, order)
        self.facts = facts
        self._make, self._drop, self._blocks_per_epoch = make, drop, blocks_per_epoch
        self._lock = threading.Lock()
        self._made: dict[int, Future[Rows]] = {}
        self._first_block, self._starts = 0, [0]
        self._seed, self._kept, self._last = 0, 0, None
        self._steps: Steps | None = None

    def plan(self, seed: int, steps: Steps, num_steps: int, anchor: dict[str, int]) -> None:
        """Before the first row is read. anchor: {} at the beginning, or what `anchor` gave."""
        self._steps = steps
        self._seed, self._kept, self._last = seed, _KEPT_STEPS * steps.size, num_steps * steps.size
        if "block" in anchor:
            self._first_block, self._starts = anchor["block"], [anchor["start"]]
        self._drop(self._first_block)  # what a session that was killed has left

    def anchor(self, position: int) -> dict[str, int]:
        with self._lock:
            nth = bisect_right(self._starts, position) - 1
            return {"block": self._first_block + nth, "start": self._starts[nth]}

    def __len__(self) -> int:
        raise TypeError("how many rows a stream has is not known before all of it is read")

    @property
    def num_targets(self) -> int:
        raise TypeError("how many tokens a stream has is not known before all of it is read")

    def at_positions(self, positions: np.ndarray, seed: int, steps: Bounds | None = None) -> np.ndarray:
        return np.asarray(positions, dtype=np.int64)

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        indices = np.asarray(indices, dtype=np.int64)
        self._reach(int(indices.max()))
        self._forget(int(indices.min()))
        with self._lock:
            starts = np.array(self._starts)
        owners = np.searchsorted(starts, indices, side="right") - 1
        for owner in np.unique(owners).tolist():
            inside = np.flatnonzero(owners == owner)
            rows = self._rows(self._first_block + owner)
            if self._blocks_per_epoch == 1:  # an epoch has the rows of the one before, and may share a step with it
                own = rows.at_positions(indices[inside], self._seed, self._steps)
            else:
                own = rows.at_positions(indices[inside] - starts[owner], self._seed + self._first_block + owner)
            yield rows, own, inside

    def _reach(self, position: int) -> None:
        """Know where the block of the position begins and ends; have the next one made. Not locked while it waits."""
        num_empty = 0
        while True:
            with self._lock:
                block, end = self._first_block + len(self._starts) - 1, self._starts[-1]
            if position < end:
                break
            num_rows = len(self._rows(block))
            num_empty = 0 if num_rows else num_empty + 1
            if num_empty > self._blocks_per_epoch:
                raise DataError("the stream holds no training row; correct data.path or lower data.validation_fraction")
            with self._lock:
                if block == self._first_block + len(self._starts) - 1:
                    self._starts.append(end + num_rows)
        if self._last is None or end < self._last:
            self._request(block)

    def _rows(self, block: int) -> Rows:
        return self._request(block).result()

    def _request(self, block: int) -> Future[Rows]:
        with self._lock:
            if block not in self._made:
                self._made[block] = Future()
                # not a pool's: those are waited for when a run ends, and a block may take long
                threading.Thread(target=self._fill, args=(block, self._made[block]), daemon=True).start()
            return self._made[block]

    def _fill(self, block: int, made: Future[Rows]) -> None:
        try:
            made.set_result(self._make(block))
        except BaseException as error:  # whoever waits for the block raises it
            made.set_exception(error)

    def _forget(self, position: int) -> None:
        """Blocks that end so far before the position that no rank reads them any more."""
        with self._lock:
            num_past = bisect_right(self._starts, position - self._kept) - 1
            first_kept = self._first_block + num_past
            past = [block for block in self._made if block < first_kept]
            for block in past:
                del self._made[block]
        if past:
            self._drop(first_kept)
