"""Rows of streamed text, which is tokenised block by block during training, from one source or several."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from samecurve.data.datasets.base import Rows
from samecurve.data.datasets.mixture import SourceSteps, SplitRows, WeightedInterleaver
from samecurve.data.sampler import Bounds, Steps
from samecurve.errors import DataError
from samecurve.storage.cache import digest

# Upper bound on the distance in steps between any two ranks and their loaders: a rank is at most one step ahead of
# another, and a loader a few steps ahead of its rank.
_KEPT_STEPS = 16


class Unsized(SplitRows):
    """Base of rows whose number is unknown before all of them are read. A row's index is its global position."""

    def __len__(self) -> int:
        raise TypeError("a stream's number of rows is unknown before all of it is read")

    @property
    def num_targets(self) -> int:
        raise TypeError("a stream's number of tokens is unknown before all of it is read")

    def at_positions(self, positions: np.ndarray, seed: int, steps: Bounds | None = None) -> np.ndarray:
        return np.asarray(positions, dtype=np.int64)


class StreamRows(Unsized):
    """Rows of a stream: one block after the other, each shuffled.

    The number of rows of a block is known only once it is tokenised. So a position is found by walking forward from an
    anchor: a block and the position of its first row. A checkpoint holds the anchor before its own position, so that
    resuming tokenises one block only, wherever it is. A background thread prepares one block ahead.
    """

    def __init__(
        self,
        make: Callable[[int], Rows],
        drop: Callable[[int], None],
        blocks_per_epoch: int,
        fingerprint: str,
        facts: dict[str, int],
    ):
        """Create the rows, and tokenise the first block.

        Args:
            make: returns the rows of a block.
            drop: called with a block's number when the blocks before it are no longer needed, except the first one.
                Later calls have higher numbers.
            blocks_per_epoch: number of blocks in one pass over the data.
            fingerprint: changes when the data do.
            facts: description of the data, for the header.
        """
        first = make(0)
        self.sequence_length = first.sequence_length
        self.fingerprint = digest(type(self).__name__, type(first).__name__, fingerprint, first.sequence_length)
        order = "the same rows in every epoch" if blocks_per_epoch == 1 else "even blocks, neighbours share no piece"
        self.fingerprint = digest(self.fingerprint, order)
        self.facts = facts
        self.make_block, self._drop, self.blocks_per_epoch = make, drop, blocks_per_epoch
        self._lock = threading.Lock()
        self._made: dict[int, Future[Rows]] = {}
        self._first_block, self._starts = 0, [0]
        self._seed, self._kept, self._last = 0, 0, None
        self._steps: Bounds | None = None

    def plan(self, seed: int, steps: Steps, num_steps: int, anchor: dict) -> None:
        self.plan_reads(seed, steps, _KEPT_STEPS * steps.size, num_steps * steps.size, anchor)

    def plan_reads(self, seed: int, steps: Bounds, kept: int, last: int, anchor: dict[str, int]) -> None:
        """Set which rows are read, and the first block. `kept`: rows that stay readable behind the newest; see plan."""
        self._seed, self._steps, self._kept, self._last = seed, steps, kept, last
        if "block" in anchor:
            self._first_block, self._starts = anchor["block"], [anchor["start"]]
        self._drop(self._first_block)  # left over from a session that was killed

    def anchor(self, position: int) -> dict[str, int]:
        with self._lock:
            nth = bisect_right(self._starts, position) - 1
            return {"block": self._first_block + nth, "start": self._starts[nth]}

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        indices = np.asarray(indices, dtype=np.int64)
        self._reach(int(indices.max()))
        with self._lock:
            # blocks that end so far before these rows that no rank reads them any more
            num_past = max(bisect_right(self._starts, int(indices.min()) - self._kept) - 1, 0)
            del self._starts[:num_past]
            self._first_block += num_past
            # another thread may go on to later blocks meanwhile
            first_block, starts = self._first_block, np.array(self._starts)
            past = [block for block in self._made if block < first_block]
            for block in past:
                del self._made[block]
        if past:
            self._drop(first_block)
        owners = np.searchsorted(starts, indices, side="right") - 1
        for owner in np.unique(owners).tolist():
            inside = np.flatnonzero(owners == owner)
            rows = self._rows(first_block + owner)
            if self.blocks_per_epoch == 1:  # epochs have the same rows, and a step may span two of them
                own = rows.at_positions(indices[inside], self._seed, self._steps)
            else:
                own = rows.at_positions(indices[inside] - starts[owner], self._seed + first_block + owner)
            yield rows, own, inside

    def _reach(self, position: int) -> None:
        """Find the bounds of the position's block, and start preparing the next block."""
        # The lock is not held while waiting for a block.
        num_empty = 0
        while True:
            with self._lock:
                block, end = self._first_block + len(self._starts) - 1, self._starts[-1]
            if position < end:
                break
            num_rows = len(self._rows(block))
            num_empty = 0 if num_rows else num_empty + 1
            if num_empty > self.blocks_per_epoch:
                raise DataError("the stream has no training rows; correct data.path or lower data.validation_fraction")
            with self._lock:
                # unless another thread has found the block's end meanwhile
                if block == self._first_block + len(self._starts) - 1:
                    self._starts.append(end + num_rows)
        # the run may end before the next block
        if self._last is None or end < self._last:
            self._request(block)

    def _rows(self, block: int) -> Rows:
        return self._request(block).result()

    def _request(self, block: int) -> Future[Rows]:
        with self._lock:
            if block not in self._made:
                self._made[block] = Future()
                # A daemon thread, because a pool's threads are waited for when a run ends, and a block may take long.
                threading.Thread(target=self._fill, args=(block, self._made[block]), daemon=True).start()
            return self._made[block]

    def _fill(self, block: int, made: Future[Rows]) -> None:
        try:
            made.set_result(self.make_block(block))
        except BaseException as error:  # raised again where the block is waited for
            made.set_exception(error)


class MixedStreams(Unsized):
    """Interleaved rows of several streams, in proportion to their weights (see mixture.WeightedInterleaver)."""

    def __init__(self, parts: Sequence[StreamRows], weights: Sequence[float]):
        self._parts, self._turns = tuple(parts), WeightedInterleaver(weights)
        self.shares = self._turns.shares
        self.sequence_length = parts[0].sequence_length
        self.fingerprint = digest(type(self).__name__, [part.fingerprint for part in parts], self.shares)

    @property
    def parts(self) -> tuple[StreamRows, ...]:
        return self._parts

    def plan(self, seed: int, steps: Steps, num_steps: int, anchor: dict) -> None:
        anchors = anchor.get("sources") or [{} for _ in self._parts]
        for source, part in enumerate(self._parts):
            kept = _KEPT_STEPS * self._turns.most(source, steps.size)
            last = self._turns.before(source, num_steps * steps.size)
            own_steps = SourceSteps(steps, self._turns, source)
            part.plan_reads(seed + source, own_steps, kept, last, anchors[source])

    def anchor(self, position: int) -> dict:
        turns = (self._turns.before(source, position) for source in range(len(self._parts)))
        return {"sources": [part.anchor(turn) for part, turn in zip(self._parts, turns, strict=True)]}

    def _split(self, indices: np.ndarray) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        sources, counts = self._turns.at(indices)
        for source in np.unique(sources).tolist():
            inside = np.flatnonzero(sources == source)
            yield self._parts[source], counts[inside], inside
