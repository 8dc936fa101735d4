"""Rows of one length, cut from a token stream, with random access."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from samecurve.data.sampler import Bounds, LengthOrder, Steps, rows_at, rows_in_steps
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.specs.data_names import WIDTH_MULTIPLE, Truncation
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from samecurve.data.token_store import TokenStream

_ROWS_PER_PASS = 256


@dataclass(frozen=True)
class RowArrays:
    """Arrays of some rows: int64, (len(indices), ...), by the names of MicroBatch's inputs and targets.

    Weights of tokens and scores of texts are float32. Arrays with one value per token have sequence_length as their
    last axis, which is cut to the width of the micro-batch. A row may consist of k sequences (two answers to compare, a
    question and its answers), whose arrays are (len(indices), k, sequence_length).
    """

    inputs: dict[str, np.ndarray]
    targets: dict[str, np.ndarray]

    @property
    def labels(self) -> np.ndarray:
        return self.targets["labels"]


def causal_arrays(
    input_ids: np.ndarray, position_ids: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> RowArrays:
    """Build the arrays for a causal language model.

    position_ids restart at 0 at each document; without an attention_mask transformers builds block-diagonal masks from
    them. labels are already shifted: labels[b, t] is the target at t.
    """
    targets = {"labels": labels} | ({} if weights is None else {"weights": weights})
    return RowArrays({"input_ids": input_ids, "position_ids": position_ids}, targets)


def range_sums(marks: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the sum of marks[start:stop] for each range, int64. The ranges must be in order and must not overlap."""
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    # reduceat gives the sums from each start to its stop, and between the ranges. A running sum would need eight times
    # the memory of the marks.
    bounds = np.stack([starts, stops], axis=1).ravel()
    at_end = bounds >= len(marks)
    sums = np.zeros(len(bounds), dtype=np.int64)
    sums[~at_end] = np.add.reduceat(marks, bounds[~at_end], dtype=np.int64)
    return np.where(stops > starts, sums[::2], 0)  # for an empty range reduceat gives the mark at its start


class Rows(ABC):
    """Rows of one length, cut from a stream of documents, with random access by arrays of indices.

    Attributes:
        sizes: (rows,), tokens of each row that is padded. Other rows define their number and their inputs themselves.
    """

    sizes: np.ndarray
    targets_are_tokens = True  # whether num_targets counts tokens
    trained_share = 1.0  # of the input tokens, those that the loss reads; 1 where rows have no such tokens

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int):
        """padding_token: any token id. Its labels are IGNORE_INDEX, and no trained token attends to it."""
        self.stream = stream
        self.sequence_length = sequence_length
        self.padding_token = padding_token
        self.fingerprint = digest(type(self).__name__, stream.fingerprint, sequence_length, padding_token)

    shares: tuple[float, ...] = ()  # of a mixture: the fraction of the rows from each source

    @property
    def parts(self) -> tuple[Rows, ...]:
        """Rows of each source of a mixture; otherwise only these rows."""
        return (self,)

    def __len__(self) -> int:
        return len(self.sizes)

    @abstractmethod
    def __getitem__(self, indices: np.ndarray) -> RowArrays: ...

    def drawn(self, indices: np.ndarray, positions: np.ndarray, seed: int) -> RowArrays:
        """Return the rows read in training, with their random augmentation (such as masking).

        The augmentation is a function of (seed, global position), so it depends neither on the number of ranks nor on
        where a run resumes.
        """
        return self[indices]

    @property
    def num_targets(self) -> int:
        """Number of targets in one pass over all rows: tokens, or whatever else the task counts. Default: rows."""
        return len(self)

    def num_inputs(self, indices: np.ndarray) -> int:
        """Return the number of input tokens in these rows, trained or not, without padding."""
        return int(self.sizes[indices].sum())

    def at_positions(self, positions: np.ndarray, seed: int, steps: Bounds | None = None) -> np.ndarray:
        """Return the indices of the rows read at the given global positions, int64 (see sampler.py).

        No optimizer step within the bounds `steps` reads a row twice. None: the order ignores steps.
        """
        if steps is None:
            return rows_at(positions, len(self), seed)
        return rows_in_steps(positions, len(self), seed, steps)

    def most_reads(self, indices: np.ndarray) -> tuple[int, int]:
        """Return (found, allowed): the largest count of one row among the indices, and the smallest possible one."""
        counts = np.unique(indices, return_counts=True)[1]
        return int(counts.max()), -(-len(indices) // len(self))

    def plan(self, seed: int, steps: Steps, num_steps: int, anchor: dict) -> None:  # noqa: B027
        """Prepare for reading; called before the first row is read. Only streams need this.

        Args:
            steps: rows of each step, in this session and in earlier ones.
            anchor: `anchor` of the checkpoint that is resumed from; {} for a new run.
        """

    def anchor(self, position: int) -> dict:
        """Return what a checkpoint needs, in addition to the position, to resume without reading earlier rows."""
        return {}

    def width(self, indices: np.ndarray) -> int:
        """Return the width in tokens of a batch of these rows. All tokens beyond it are padding."""
        return self.sequence_length

    def target_bytes(self, byte_lengths: np.ndarray) -> int:
        """Return the bytes of text of all targets, given the bytes per token, (vocabulary,)."""
        return sum(int(byte_lengths[labels[labels != IGNORE_INDEX]].sum()) for labels in self._all_labels())

    def _all_labels(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), _ROWS_PER_PASS):
            yield self[np.arange(start, min(start + _ROWS_PER_PASS, len(self)))].labels

    def _take(self, places: np.ndarray, valid: np.ndarray) -> np.ndarray:
        return np.where(valid, self.stream.tokens[np.where(valid, places, 0)], self.padding_token).astype(np.int64)

    def _targets(self, places: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Return labels for the targets at `places`: IGNORE_INDEX where they are not valid or not trained."""
        if self.stream.trained is not None:
            valid = valid & (self.stream.trained[np.where(valid, places, 0)] > 0)
        return np.where(valid, self._take(places, valid), IGNORE_INDEX)

    def _weights(self, places: np.ndarray, valid: np.ndarray) -> np.ndarray | None:
        """Return the weights of the targets at `places`, float32; None if all are 1."""
        if self.stream.weights is None:
            return None
        return np.where(valid, self.stream.weights[np.where(valid, places, 0)], np.float32(0))


class PackedRows(Rows):
    """Concatenated documents, cut every `sequence_length` tokens.

    With S = sequence_length, row i reads tokens [i * S, (i + 1) * S) and predicts tokens [i * S + 1, (i + 1) * S + 1).
    So every token is a target exactly once, except the first token of each document.
    """

    def __len__(self) -> int:
        return -(-max(0, len(self.stream.tokens) - 1) // self.sequence_length)

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        row_starts = np.asarray(indices, dtype=np.int64)[:, None] * self.sequence_length
        places = row_starts + np.arange(self.sequence_length)
        targets, num_tokens = places + 1, len(self.stream.tokens)
        # Positions of the padding continue those of the last document instead of starting a new block. Padding comes
        # after every trained token, so causal attention already hides it.
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


def truncate(lengths: np.ndarray, limit: int, truncation: Truncation) -> tuple[np.ndarray, np.ndarray]:
    """Truncate sequences to at most `limit` tokens.

    `right` keeps the first tokens (TRL's keep_start), `left` the last ones (keep_end), whatever they are. `drop` keeps
    nothing of a longer sequence. `error` is `right`: `splits.refuse_long_documents` has reported longer ones.

    Returns:
        (tokens before the first kept one, kept tokens) of each sequence.
    """
    kept = np.where(lengths > limit, 0 if truncation == "drop" else limit, lengths)
    return lengths - kept if truncation == "left" else np.zeros_like(lengths), kept


class TruncatedRows(Rows):
    """Rows of whole documents; those with a sequence that is longer than a row are truncated or left out.

    Attributes:
        truncation: `data.truncation`.
        too_long: indices of the documents with a sequence of more than `limit` tokens.
        num_truncated: number of documents that were truncated.
        num_truncated_tokens: number of tokens that truncation removed.
        num_dropped: number of documents that are left out, because they are too long or nothing is left to train.
    """

    ahead = 0  # tokens beyond a sequence's inputs that are read as its targets
    num_dropped: int

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int, truncation: Truncation = "right"):
        super().__init__(stream, sequence_length, padding_token)
        self.truncation: Truncation = truncation
        if truncation in ("left", "drop"):  # where nothing is too long, rows of `error` are those of `right`
            self.fingerprint = digest(self.fingerprint, truncation)

    @property
    def limit(self) -> int:
        """Number of tokens of the longest sequence that is not truncated."""
        return self.sequence_length + self.ahead

    def _truncate(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `truncate` of the sequences of each document, (documents, sequences), and count what is removed."""
        skipped, kept = truncate(lengths, self.limit, self.truncation)
        self.too_long = np.flatnonzero((lengths > self.limit).any(axis=1))
        self.num_truncated = 0 if self.truncation == "drop" else len(self.too_long)
        self.num_truncated_tokens = 0 if self.truncation == "drop" else int((lengths - kept).sum())
        return skipped, kept


class SampleRows(TruncatedRows):
    """Rows of documents that are each truncated to one row, instead of continued in the next.

    The last token of a document is only a target, so a document of n tokens takes n - 1 places of a row.

    Attributes:
        sizes: places that each document takes in a row.
    """

    ahead = 1

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int, truncation: Truncation = "right"):
        super().__init__(stream, sequence_length, padding_token, truncation)
        skipped, kept = (counts[:, 0] for counts in self._truncate(np.diff(stream.offsets)[:, None]))
        starts, sizes = stream.offsets[:-1] + skipped, np.maximum(kept - 1, 0)
        is_trained = self._count_trained(starts, sizes) > 0
        self.num_dropped = int((~is_trained).sum())
        self._starts, self.sizes = starts[is_trained], sizes[is_trained]

    @cached_property
    def num_targets(self) -> int:
        return int(self._count_trained(self._starts, self.sizes).sum())

    def _count_trained(self, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Count the trained tokens among the targets of each document."""
        if self.stream.trained is None:
            return sizes
        return range_sums(self.stream.trained, starts + 1, starts + 1 + sizes)


class DocumentRows(SampleRows):
    """Rows of one document each, truncated and padded. Rows have different numbers of trained tokens."""

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        steps = np.arange(self.sequence_length)[None, :]
        places, sizes = self._starts[indices][:, None] + steps, self.sizes[indices][:, None]
        # Positions of the padding continue, as in PackedRows.
        positions = np.broadcast_to(steps, places.shape).copy()
        of_targets = places + 1, steps < sizes
        inputs = self._take(places, steps <= sizes)
        return causal_arrays(inputs, positions, self._targets(*of_targets), self._weights(*of_targets))


class LengthGroups(Rows):
    """Mixin for padded rows: the rows of a step have nearly the same length and are padded to the longest of them.

    The order is that of data.sampler.LengthOrder and needs `sizes`, the length of each row. The number of rows per step
    must not change during a run, so it is part of the fingerprint.
    """

    def __init__(self, *arguments, global_batch_size: int):
        super().__init__(*arguments)
        self.global_batch_size = global_batch_size
        self.fingerprint = digest(self.fingerprint, "grouped within each epoch", global_batch_size)

    def at_positions(self, positions: np.ndarray, seed: int, steps: Bounds | None = None) -> np.ndarray:
        if len(self) < 2 * self.global_batch_size:  # LengthOrder needs at least the rows of two steps
            return super().at_positions(positions, seed, Steps.of(self.global_batch_size))
        return LengthOrder(self.sizes, self.global_batch_size, seed).rows_at(positions)

    def width(self, indices: np.ndarray) -> int:
        longest = int(self.sizes[indices].max())
        return min(self.sequence_length, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


@cache
def grouped(kind: Any) -> Any:
    """Return the subclass of a class of padded rows whose rows are grouped by length."""
    return type(f"Grouped{kind.__name__}", (LengthGroups, kind), {})  # the name is part of the fingerprint
