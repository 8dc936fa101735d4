"""Rows for contrastive training: an anchor and its candidates, as separate sequences."""

from __future__ import annotations

import numpy as np

from samecurve.data.datasets.base import RowArrays, Rows
from samecurve.data.datasets.text import LabelledRows
from samecurve.data.token_store import TokenStream


class RetrievalRows(Rows):
    """Rows of num_sequences texts each: anchor, positive, hard negatives.

    Each document of the stream is a row, and its segments separate the texts. Arrays are (len(indices), num_sequences,
    sequence_length). Model and loss both get the attention_mask. Labels are (len(indices),), 0 for rows that count.
    """

    targets_are_tokens = False

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int):
        super().__init__(stream, sequence_length, padding_token)
        segments, num_rows = stream.segments, len(stream.offsets) - 1
        assert segments is not None  # MatchEncoder is segmented
        begins = np.ones(len(segments), dtype=bool)
        begins[1:] = segments[1:] != segments[:-1]  # a row's last segment is never its first
        bounds = np.append(np.flatnonzero(begins), len(segments))
        self.num_sequences = (len(bounds) - 1) // max(num_rows, 1)
        self._starts = bounds[:-1].reshape(num_rows, -1)
        self._lengths = np.diff(bounds).reshape(num_rows, -1)
        self.sizes = self._lengths.max(axis=1, initial=0)

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        steps = np.arange(self.sequence_length)
        exists = steps < self._lengths[indices][..., None]
        mask = exists.astype(np.int64)
        inputs = {"input_ids": self._take(self._starts[indices][..., None] + steps, exists), "attention_mask": mask}
        return RowArrays(inputs, {"labels": np.zeros(len(indices), dtype=np.int64), "attention_mask": mask})

    def num_inputs(self, indices: np.ndarray) -> int:
        return int(self._lengths[indices].sum())

    @property
    def roles(self) -> tuple[str, ...]:
        """Name of each sequence of a row."""
        return ("anchor", "positive", *(f"negative {number}" for number in range(1, self.num_sequences - 1)))

    def texts(self) -> LabelledRows:
        """Return rows of one text each, in order. A text's label is its index in `roles`."""
        bounds = np.append(self._starts.ravel(), len(self.stream.tokens))
        labels = np.tile(np.arange(self.num_sequences), len(self))
        stream = TokenStream(self.stream.tokens, bounds, self.stream.fingerprint, labels=labels)
        return LabelledRows(stream, self.sequence_length, self.padding_token)

    def candidates(self) -> np.ndarray:
        """Return a text id per candidate, int64 (rows, num_sequences - 1), positives first. Equal texts share one."""
        known: dict[bytes, int] = {}
        spans = zip(self._starts[:, 1:].ravel(), self._lengths[:, 1:].ravel(), strict=True)
        text_ids = [
            known.setdefault(np.asarray(self.stream.tokens[start : start + length]).tobytes(), len(known))
            for start, length in spans
        ]
        return np.array(text_ids, dtype=np.int64).reshape(len(self), -1)
