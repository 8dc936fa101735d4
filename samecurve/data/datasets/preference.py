"""Rows of preferences: two sequences each, of a pair the chosen answer first."""

from __future__ import annotations

import numpy as np

from samecurve.data.datasets.base import DocumentRows, RowArrays, TruncatedRows, causal_arrays, range_sums, truncate
from samecurve.data.token_store import TokenStream
from samecurve.specs.data_names import Truncation
from samecurve.storage.cache import digest

_VERSION = 2  # part of the fingerprint of JudgedRows: raise it when the same documents give other rows


class PairRows(TruncatedRows):
    """Rows of one pair each. Arrays are (rows, 2, sequence_length).

    Each document of the stream is a pair: segment 0 is the chosen answer, segment 1 the rejected one. Each answer is
    truncated and padded to the row's length. A pair is left out if truncation makes both sequences equal, or leaves one
    without a trained token.

    Attributes:
        sizes: length of the longer answer of each pair.
    """

    targets_are_tokens = False

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int, truncation: Truncation = "right"):
        super().__init__(stream, sequence_length, padding_token, truncation)
        offsets = np.asarray(stream.offsets)
        assert stream.segments is not None  # PairEncoder is segmented
        num_rejected = range_sums(stream.segments, offsets[:-1], offsets[1:])
        lengths = np.stack([np.diff(offsets) - num_rejected, num_rejected], axis=1)
        starts = np.stack([offsets[:-1], offsets[1:] - num_rejected], axis=1)
        # with the pairs that are left out, because the documents of a TokenStream leave no gap
        self._bounds = np.append(starts.ravel(), offsets[-1])
        skipped, cut = self._truncate(lengths)
        starts = starts + skipped
        assert stream.trained is not None  # PairEncoder is masked
        stops = starts + cut
        firsts = np.minimum(starts + 1, stops)  # the first token of a sequence cannot be a target
        num_trained = range_sums(stream.trained, firsts.ravel(), stops.ravel()).reshape(starts.shape)
        distinct = cut[:, 0] != cut[:, 1]
        for index in np.flatnonzero(~distinct):
            chosen, rejected = (stream.tokens[start : start + cut[index, 0]] for start in starts[index])
            distinct[index] = not np.array_equal(chosen, rejected)
        kept = distinct & (num_trained > 0).all(axis=1)
        self.num_dropped = int((~kept).sum())
        self._starts, self._sizes = starts[kept], cut[kept] - self.ahead
        self.sizes = self._sizes.max(axis=1, initial=0)
        self.trained_share = float(num_trained[kept].sum() / max(1, self._sizes.sum()))

    def num_inputs(self, indices: np.ndarray) -> int:
        return int(self._sizes[indices].sum())

    def answers(self) -> DocumentRows:
        """Return rows of one answer each, chosen and rejected in turn."""
        stream = TokenStream(self.stream.tokens, self._bounds, self.stream.fingerprint, self.stream.trained)
        return DocumentRows(stream, self.sequence_length, self.padding_token, self.truncation)

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the rows' inputs in the stream, and a mask of non-padding."""
        steps = np.arange(self.sequence_length)
        return self._starts[indices][..., None] + steps, steps < self._sizes[indices][..., None]


class AnswerRows(PairRows):
    """Pairs for a causal language model. Labels are already shifted, and IGNORE_INDEX in the prompt.

    Attributes:
        reference: (rows, 2) fp32, log-probability of each answer under the reference model; None until it is computed.
    """

    ahead = 1
    reference: np.ndarray | None = None

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        places, exists = self._places(indices)
        # Positions of the padding continue, as in PackedRows.
        positions = np.broadcast_to(np.arange(self.sequence_length), places.shape).copy()
        arrays = causal_arrays(self._take(places, exists), positions, self._targets(places + 1, exists))
        if self.reference is not None:
            arrays.targets["reference"] = np.asarray(self.reference[indices])
        return arrays


class JudgedRows(TruncatedRows):
    """Rows of one answer each with its verdict (KTO). Arrays are (rows, 2, sequence_length), those of AnswerRows.

    The first sequence is prompt and answer of a document. The second is its prompt and an answer to the prompt before
    it, see `_answers_to_others`: a wrong answer, by which KTO measures how far the model is from the reference. TRL
    takes one within each device's batch; here it does not depend on batches. Documents are left out if truncation
    leaves no trained token.

    Attributes:
        reference: as in AnswerRows.
        is_good: (rows,) bool.
        sizes: length of the longer sequence of each row.
    """

    ahead = 1
    targets_are_tokens = False
    reference: np.ndarray | None = None

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int, truncation: Truncation = "right"):
        super().__init__(stream, sequence_length, padding_token, truncation)
        assert stream.trained is not None and stream.labels is not None  # JudgedEncoder is masked and labelled
        starts, stops = np.asarray(stream.offsets[:-1]), np.asarray(stream.offsets[1:])
        trained = np.append(np.flatnonzero(stream.trained), len(stream.trained))
        prompts = np.minimum(trained[np.searchsorted(trained, starts)], stops) - starts
        skipped, kept = (counts[:, 0] for counts in self._truncate((stops - starts)[:, None]))
        firsts = np.minimum(starts + skipped + 1, stops)  # the first token of a sequence cannot be a target
        num_trained = range_sums(stream.trained, firsts, np.maximum(firsts, starts + skipped + kept))
        is_kept = num_trained > 0
        self.num_dropped = int((~is_kept).sum())
        self.is_good = np.asarray(stream.labels)[is_kept] > 0
        starts, stops, prompts = starts[is_kept], stops[is_kept], prompts[is_kept]
        before = _answers_to_others(stream, starts, prompts)
        self.fingerprint = digest(self.fingerprint, _VERSION)
        answers = np.stack([starts + prompts, (starts + prompts)[before]], axis=1)
        lengths = prompts[:, None] + np.stack([stops, stops[before]], axis=1) - answers
        self._skipped, kept = truncate(lengths, self.limit, "right" if truncation == "drop" else truncation)
        self._starts, self._prompts, self._answers, self._sizes = starts, prompts, answers, kept - self.ahead
        self.sizes = self._sizes.max(axis=1, initial=0)
        # each answer is read twice: after its own prompt and after another one
        self.trained_share = float(2 * num_trained[is_kept].sum() / max(1, self._sizes.sum()))

    def num_inputs(self, indices: np.ndarray) -> int:
        return int(self._sizes[indices].sum())

    def answers(self) -> DocumentRows:
        """Return rows of one answer each."""
        return DocumentRows(self.stream, self.sequence_length, self.padding_token, self.truncation)

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        steps = np.arange(self.sequence_length + 1) + self._skipped[indices][..., None]
        prompts, starts = self._prompts[indices][:, None, None], self._starts[indices][:, None, None]
        places = np.where(steps < prompts, starts + steps, self._answers[indices][..., None] + steps - prompts)
        exists = np.arange(self.sequence_length) < self._sizes[indices][..., None]
        positions = np.broadcast_to(np.arange(self.sequence_length), exists.shape).copy()
        labels = self._targets(places[..., 1:], exists)
        arrays = causal_arrays(self._take(places[..., :-1], exists), positions, labels)
        arrays.targets["is_good"] = self.is_good[indices].astype(np.int64)
        if self.reference is not None:
            arrays.targets["reference"] = np.asarray(self.reference[indices])
        return arrays


def _answers_to_others(stream: TokenStream, starts: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Return for each document the index of one with another prompt, whose answer is a wrong one.

    Neighbours with the same prompt, such as both answers of a pair, are a group. Its first document gets the first one
    of the group before it, and so on, so that a chosen answer of pairs gets a chosen one. The first group follows the
    last one. If all prompts are the same, each document gets the one before it.

    Args:
        stream: tokens of all documents.
        starts: (documents,), index of the first token of each one.
        prompts: (documents,), number of tokens of each one's prompt.
    """

    def is_same(one: int, other: int) -> bool:
        # some templates begin an answer with a token that others have in the prompt
        size = min(prompts[one], prompts[other])
        first, second = (stream.tokens[start : start + size] for start in (starts[one], starts[other]))
        return np.array_equal(first, second)

    indices = np.arange(len(starts))
    begins = np.array([n for n in range(len(starts)) if not n or not is_same(n - 1, n)], dtype=np.int64)
    if len(begins) < 2:
        return np.roll(indices, 1)
    sizes, before = np.diff(begins, append=len(starts)), np.roll(np.arange(len(begins)), 1)
    if len(begins) > 2 and is_same(0, int(begins[-1])):
        before[0] -= 1
    nth = indices - begins.repeat(sizes)
    return begins[before].repeat(sizes) + nth % sizes[before].repeat(sizes)


class ScoredRows(PairRows):
    """Pairs for a model that scores whole texts. Labels are (rows,), 0 for every pair: the first answer is better."""

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        places, exists = self._places(indices)
        inputs = {"input_ids": self._take(places, exists), "attention_mask": exists.astype(np.int64)}
        return RowArrays(inputs, {"labels": np.zeros(len(indices), dtype=np.int64)})

    @property
    def num_ended_by_padding(self) -> int:
        """Number of sequences that end with the padding token. transformers reads their score one token earlier."""
        return int((self.stream.tokens[self._starts + self._sizes - 1] == self.padding_token).sum())
