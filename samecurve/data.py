"""Tokens to rows, and rows to the micro-batches of each optimizer step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cache import digest
from .loss import IGNORE_INDEX
from .order import rows_at

if TYPE_CHECKING:
    from .config import Batch
    from .corpus import TokenStream

_PREFETCHED_STEPS = 2
_ROWS_PER_PASS = 256


@dataclass(frozen=True)
class MicroBatch:
    """What one device reads in one forward pass: three int64 tensors (micro_batch_size, sequence_length).

    position_ids restart at 0 where a document starts; transformers builds block-diagonal masks from that when there
    is no attention_mask. labels are already shifted: labels[b, t] is the target at position t, or IGNORE_INDEX.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> MicroBatch:
        return MicroBatch(*(t.to(device, non_blocking=True) for t in self._tensors))

    def pin_memory(self) -> MicroBatch:
        return MicroBatch(*(t.pin_memory() for t in self._tensors))

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.input_ids, self.position_ids, self.labels


class RowArrays(NamedTuple):
    """The rows of some indices: int64 arrays (len(indices), sequence_length), as in MicroBatch."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray


class Rows(ABC):
    """Rows of one length, cut from a stream of documents and readable by any index."""

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int):
        """padding_token: any token; its labels are IGNORE_INDEX and no trained token attends to it."""
        self.stream = stream
        self.sequence_length = sequence_length
        self.padding_token = padding_token
        self.fingerprint = digest(type(self).__name__, stream.fingerprint, sequence_length, padding_token)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, indices: np.ndarray) -> RowArrays: ...

    @property
    @abstractmethod
    def num_targets(self) -> int:
        """Trained tokens in one pass over all rows."""

    def target_bytes(self, byte_lengths: np.ndarray) -> int:
        """Bytes of text that the targets of all rows stand for. byte_lengths: (vocabulary,) bytes per token."""
        return sum(int(byte_lengths[labels[labels != IGNORE_INDEX]].sum()) for labels in self._all_labels())

    def _all_labels(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self), _ROWS_PER_PASS):
            yield self[np.arange(start, min(start + _ROWS_PER_PASS, len(self)))].labels

    def _take(self, places: np.ndarray, valid: np.ndarray) -> np.ndarray:
        return np.where(valid, self.stream.tokens[np.where(valid, places, 0)], self.padding_token).astype(np.int64)


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
        return RowArrays(self._take(places, places < num_tokens), position_ids, labels)

    @property
    def num_targets(self) -> int:
        return len(self.stream.tokens) - (len(self.stream.offsets) - 1)

    def _document_starts(self, places: np.ndarray) -> np.ndarray:
        starts = self.stream.offsets[:-1]
        return starts[np.searchsorted(starts, places, side="right") - 1]


class DocumentRows(Rows):
    """Each document is a row of its own, truncated and padded, so rows train different numbers of tokens.

    num_truncated: documents that lost their end. num_dropped: those of one token, with nothing to predict.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int):
        super().__init__(stream, sequence_length, padding_token)
        lengths = np.diff(stream.offsets)
        kept = lengths > 1
        self.num_dropped = int((~kept).sum())
        self.num_truncated = int((lengths > sequence_length + 1).sum())
        self._starts = stream.offsets[:-1][kept]
        self._lengths = lengths[kept]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        steps = np.arange(self.sequence_length)[None, :]
        places, lengths = self._starts[indices][:, None] + steps, self._lengths[indices][:, None]
        trained = steps + 1 < lengths
        labels = np.where(trained, self._take(places + 1, trained), IGNORE_INDEX)
        # Padding counts on, as in PackedRows.
        return RowArrays(self._take(places, steps < lengths), np.broadcast_to(steps, places.shape).copy(), labels)

    @property
    def num_targets(self) -> int:
        return int(np.minimum(self._lengths - 1, self.sequence_length).sum())


def make_rows(stream: TokenStream, sequence_length: int, padding_token: int, packing: bool) -> Rows:
    return (PackedRows if packing else DocumentRows)(stream, sequence_length, padding_token)


class StepBatches:
    """The micro-batches of one data-parallel rank, one list per optimizer step; prepared ahead by a thread.

    A pure function of the step: step s reads the global positions [s * G, (s + 1) * G), G = batch.global_batch_size,
    whatever the shard and the micro-batch. shard: (data-parallel rank, data-parallel size); G must divide into them,
    which the configuration has checked. start_step, start_samples: where a run goes on; nothing before it is looked at.
    """

    def __init__(
        self,
        rows: Rows,
        seed: int,
        batch: Batch,
        shard: tuple[int, int],
        num_steps: int,
        start_step: int = 0,
        start_samples: int | None = None,
    ):
        self.rows, self.seed, self.batch, self.shard = rows, seed, batch, shard
        self.num_steps = num_steps
        self.step = start_step
        given = start_step * batch.global_batch_size if start_samples is None else start_samples
        self._origin = given - start_step * batch.global_batch_size  # not 0 when the batch's size was another before
        self.last_wait_seconds = 0.0
        assert batch.global_batch_size % (batch.micro_batch_size * shard[1]) == 0

    @property
    def samples(self) -> int:
        """Rows consumed by all ranks, this step's included."""
        return self._origin + self.step * self.batch.global_batch_size

    @property
    def epoch(self) -> float:
        """Passes over the rows, as a fraction."""
        return self.samples / len(self.rows)

    def at(self, step: int) -> list[MicroBatch]:
        """The micro-batches that this rank reads in the given 0-based step."""
        rank, size = self.shard
        own = np.split(self.rows_of(step), size)[rank]
        return _micro_batches(self.rows[own], self.batch.micro_batch_size)

    def rows_of(self, step: int) -> np.ndarray:
        """int64 (global_batch_size,): the rows that all ranks together read in the given 0-based step."""
        start = self._origin + step * self.batch.global_batch_size
        return rows_at(np.arange(start, start + self.batch.global_batch_size), len(self.rows), self.seed)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """From `step` on, counting it up; `last_wait_seconds` says how long the list just handed out took to come."""
        upcoming = iter(range(self.step, self.num_steps))
        with ThreadPoolExecutor(1, thread_name_prefix="step-batches") as pool:
            pending = deque(pool.submit(self.at, step) for step in islice(upcoming, _PREFETCHED_STEPS))
            while pending:
                began = time.perf_counter()
                micro_batches = pending.popleft().result()
                self.last_wait_seconds = time.perf_counter() - began
                pending.extend(pool.submit(self.at, step) for step in islice(upcoming, 1))
                self.step += 1
                yield micro_batches


class EvaluationBatches(Sequence[MicroBatch]):
    """Every row exactly once over all shards, in order; the same number of micro-batches on each shard.

    What is missing to fill the last ones is a copy of the first row with nothing to train. Made when asked for:
    held-out data may be large. alive: called for each, which says that a long evaluation gets on.
    """

    def __init__(
        self, rows: Rows, micro_batch_size: int, shard: tuple[int, int], alive: Callable[[], None] = lambda: None
    ):
        self.rows, self.micro_batch_size, self.shard = rows, micro_batch_size, shard
        self._alive = alive

    def __len__(self) -> int:
        return -(-len(self.rows) // (self.micro_batch_size * self.shard[1]))

    def __getitem__(self, index: int) -> MicroBatch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self._alive()
        first = (self.shard[0] * len(self) + index) * self.micro_batch_size
        indices = np.arange(first, first + self.micro_batch_size)
        exists = indices < len(self.rows)
        input_ids, position_ids, labels = self.rows[np.where(exists, indices, 0)]
        labels = np.where(exists[:, None], labels, IGNORE_INDEX)
        return _micro_batches(RowArrays(input_ids, position_ids, labels), self.micro_batch_size)[0]


def _micro_batches(rows: RowArrays, micro_batch_size: int) -> list[MicroBatch]:
    tensors = [torch.from_numpy(array).split(micro_batch_size) for array in rows]
    micro_batches = [MicroBatch(*parts) for parts in zip(*tensors, strict=True)]
    return [m.pin_memory() for m in micro_batches] if torch.cuda.is_available() else micro_batches
