"""Tokens to rows of one length, readable by any index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.length_order import LengthOrder
from samecurve.data.packing import best_fit_decreasing
from samecurve.data.sampler import Bounds, Steps, rows_at, rows_in_steps
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from samecurve.data.token_store import TokenStream

_ROWS_PER_PASS = 256
# Matrices whose sides are a multiple of this are computed faster on GPUs, and there are fewer shapes.
_WIDTH_MULTIPLE = 64


@dataclass(frozen=True)
class RowArrays:
    """The rows of some indices, by the names that MicroBatch gives them: int64 arrays (len(indices), ...).

    What is long as a row has sequence_length as its last axis, and is cut to what its micro-batch needs. A row may be k
    sequences (two answers to compare, a question and what answers it): (len(indices), k, sequence_length).
    """

    inputs: dict[str, np.ndarray]
    targets: dict[str, np.ndarray]

    @property
    def labels(self) -> np.ndarray:
        return self.targets["labels"]


def causal_arrays(input_ids: np.ndarray, position_ids: np.ndarray, labels: np.ndarray) -> RowArrays:
    """What a causal language model reads. position_ids restart at 0 where a document starts: without an attention_mask
    transformers builds block-diagonal masks from that. labels are already shifted: labels[b, t] is the target at t."""
    return RowArrays({"input_ids": input_ids, "position_ids": position_ids}, {"labels": labels})


def range_sums(marks: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """int64, the sum of marks[start:stop] for each range; the ranges are in order and do not overlap.

    Without a running sum, which is eight times the marks' memory.
    """
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    # The sums from each start to its stop, and between.
    bounds = np.stack([starts, stops], axis=1).ravel()
    at_end = bounds >= len(marks)
    sums = np.zeros(len(bounds), dtype=np.int64)
    sums[~at_end] = np.add.reduceat(marks, bounds[~at_end], dtype=np.int64)
    return np.where(stops > starts, sums[::2], 0)


class Rows(ABC):
    """Rows of one length, cut from a stream of documents and readable by any index."""

    targets_are_tokens = True

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int):
        """padding_token: any token; its labels are IGNORE_INDEX and no trained token attends to it."""
        self.stream = stream
        self.sequence_length = sequence_length
        self.padding_token = padding_token
        self.fingerprint = digest(type(self).__name__, stream.fingerprint, sequence_length, padding_token)

    shares: tuple[float, ...] = ()
    """Of a mixture: which part of the rows is from each source."""

    @property
    def parts(self) -> tuple[Rows, ...]:
        """The sources of a mixture; else these rows themselves."""
        return (self,)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, indices: np.ndarray) -> RowArrays: ...

    def drawn(self, indices: np.ndarray, positions: np.ndarray, seed: int) -> RowArrays:
        """The rows that are read at these global positions. What is random in them is a function of (seed, position),
        so it depends neither on the ranks nor on where a run goes on."""
        return self[indices]

    @property
    @abstractmethod
    def num_targets(self) -> int:
        """What is trained on in one pass over all rows: tokens, or whatever else the task counts."""

    @abstractmethod
    def num_inputs(self, indices: np.ndarray) -> int:
        """Tokens that a model reads in these rows, trained or not, without padding."""

    def at_positions(self, positions: np.ndarray, seed: int, steps: Bounds | None = None) -> np.ndarray:
        """int64: which rows are read at the given global positions, see sampler.py.

        steps: none of them reads a row twice; None: rows are read one by one."""
        if steps is None:
            return rows_at(positions, len(self), seed)
        return rows_in_steps(positions, len(self), seed, steps)

    def most_reads(self, indices: np.ndarray) -> tuple[int, int]:
        """(found, allowed): how often the row that is most often among the indices is, and how often it has to be."""
        counts = np.unique(indices, return_counts=True)[1]
        return int(counts.max()), -(-len(indices) // len(self))

    def plan(self, seed: int, steps: Steps, num_steps: int, anchor: dict[str, int]) -> None:  # noqa: B027
        """What will be read, and what `anchor` gave when a run stopped. Most rows need not know."""

    def anchor(self, position: int) -> dict[str, int]:
        """What a run needs to know, beside the position, to go on from there without looking at what is before."""
        return {}

    def width(self, indices: np.ndarray) -> int:
        """How long these rows have to be where they are read together: what is behind is padding."""
        return self.sequence_length

    def target_bytes(self, byte_lengths: np.ndarray) -> int:
        """Bytes of text that the targets of all rows stand for. byte_lengths: (vocabulary,) bytes per token."""
        return sum(int(byte_lengths[labels[labels != IGNORE_INDEX]].sum()) for labels in self._all_labels())

    def _all_labels(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), _ROWS_PER_PASS):
            yield self[np.arange(start, min(start + _ROWS_PER_PASS, len(self)))].labels

    def _take(self, places: np.ndarray, valid: np.ndarray) -> np.ndarray:
        return np.where(valid, self.stream.tokens[np.where(valid, places, 0)], self.padding_token).astype(np.int64)

    def _targets(self, places: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Labels for the targets at `places`, where they are valid and trained."""
        if self.stream.trained is not None:
            valid = valid & (self.stream.trained[np.where(valid, places, 0)] > 0)
        return np.where(valid, self._take(places, valid), IGNORE_INDEX)


class PackedRows(Rows):
    """All documents end to end, cut every `sequence_length` tokens.

    Row i reads tokens [i * S, (i + 1) * S) and predicts tokens [i * S + 1, (i + 1) * S + 1), so every token is a
    target exactly once, except the first of each document, which nothing precedes.
    """

    def __len__(self) -> int:
        return -(-max(0, len(self.stream.tokens) - 1) // self.sequence_length)

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        row_starts = np.asarray(indices, dtype=np.int64)[:, None] * self.sequence_length
        places = row_starts + np.arange(self.sequence_length)
        targets, num_tokens = places + 1, len(self.stream.tokens)
        # Padding counts on from the last document instead of starting a block of its own: it comes after every trained
        # token, so causal attention already hides it.
        position_ids = places - np.maximum(self._document_starts(places), row_starts)
        trained = (targets < num_tokens) & (self._document_starts(targets) != targets)
        labels = np.where(trained, self._take(targets, targets < num_tokens), IGNORE_INDEX)
        return causal_arrays(self._take(places, places < num_tokens), position_ids, labels)

    @property
    def num_targets(self) -> int:
        return len(self.stream.tokens) - (len(self.stream.offsets) - 1)

    def num_inputs(self, indices: np.ndarray) -> int:
        starts = np.asarray(indices, dtype=np.int64) * self.sequence_length
        return int(np.minimum(len(self.stream.tokens) - starts, self.sequence_length).sum())

    def _document_starts(self, places: np.ndarray) -> np.ndarray:
        starts = self.stream.offsets[:-1]
        return starts[np.searchsorted(starts, places, side="right") - 1]


class SampleRows(Rows):
    """Rows of whole documents, or of what of a document fits into a row.

    Its last token is only a target, so a document of n tokens takes n - 1 places. num_truncated: documents that lost
    their end, num_truncated_tokens: what they lost. num_dropped: those that train nothing (in what is left of them).
    """

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int):
        super().__init__(stream, sequence_length, padding_token)
        lengths = np.diff(stream.offsets)
        sizes = np.clip(lengths - 1, 0, sequence_length)
        kept = self._count_trained(stream.offsets[:-1], sizes) > 0
        self.num_dropped = int((~kept).sum())
        self.num_truncated = int((lengths > sequence_length + 1).sum())
        self.num_truncated_tokens = int(np.maximum(lengths - 1 - sequence_length, 0).sum())
        self._starts, self.sizes = stream.offsets[:-1][kept], sizes[kept]

    @cached_property
    def num_targets(self) -> int:
        return int(self._count_trained(self._starts, self.sizes).sum())

    def _count_trained(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Trained tokens among the targets of each document."""
        if self.stream.trained is None:
            return sizes
        return range_sums(self.stream.trained, starts + 1, starts + 1 + sizes)


class DocumentRows(SampleRows):
    """Each document is a row of its own, truncated and padded, so rows train different numbers of tokens."""

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        steps = np.arange(self.sequence_length)[None, :]
        places, sizes = self._starts[indices][:, None] + steps, self.sizes[indices][:, None]
        # Padding counts on, as in PackedRows.
        positions = np.broadcast_to(steps, places.shape).copy()
        return causal_arrays(self._take(places, steps <= sizes), positions, self._targets(places + 1, steps < sizes))

    def num_inputs(self, indices: np.ndarray) -> int:
        return int(self.sizes[indices].sum())


class LengthGroups(Rows):
    """Rows of nearly the same length in each step (length_order.py), padded to the longest of them only.

    `sizes`: each row's length. A step must not change its number of rows, so that is part of the fingerprint.
    """

    def __init__(self, *arguments, global_batch_size: int):
        super().__init__(*arguments)
        self.global_batch_size = global_batch_size
        self.fingerprint = digest(self.fingerprint, "grouped within each epoch", global_batch_size)

    def at_positions(self, positions: np.ndarray, seed: int, steps: Bounds | None = None) -> np.ndarray:
        if len(self) < 2 * self.global_batch_size:  # an epoch has no two whole steps to distribute its rows over
            return super().at_positions(positions, seed, Steps.of(self.global_batch_size))
        return LengthOrder(self.sizes, self.global_batch_size, seed).rows_at(positions)

    def width(self, indices: np.ndarray) -> int:
        longest = int(self.sizes[indices].max())
        return min(self.sequence_length, -(-longest // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE)


class GroupedDocumentRows(LengthGroups, DocumentRows):
    """Documents of nearly the same length in each step."""


class PackedSampleRows(SampleRows):
    """Whole documents side by side, none cut in two, in the fewest rows that best-fit-decreasing finds.

    Which documents share a row is a pure function of their lengths; position_ids restart at each.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int):
        super().__init__(stream, sequence_length, padding_token)
        self.members, self.row_offsets = best_fit_decreasing(self.sizes, sequence_length)
        self._loads = np.diff(np.concatenate([[0], np.cumsum(self.sizes[self.members])])[self.row_offsets])

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        rows = [self._row(index) for index in np.asarray(indices, dtype=np.int64)]
        places, positions, valid = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        return causal_arrays(self._take(places, valid), positions, self._targets(places + 1, valid))

    def num_inputs(self, indices: np.ndarray) -> int:
        return int(self._loads[indices].sum())

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where in the stream the row's inputs are, their positions, and which of them are not padding."""
        members = self.members[self.row_offsets[index] : self.row_offsets[index + 1]]
        sizes = self.sizes[members]
        firsts = np.cumsum(sizes) - sizes
        steps = np.arange(self.sequence_length)
        # Padding counts on from the last document, as in PackedRows.
        nth = np.searchsorted(firsts, steps, side="right") - 1
        positions = steps - firsts[nth]
        return self._starts[members][nth] + positions, positions, steps < sizes.sum()
