"""Rows of one text each, for classification and masked language models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.datasets.base import RowArrays, Rows
from samecurve.data.sampler import uniform
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from samecurve.data.token_store import TokenStream


class TextRows(Rows):
    """Padded rows of one text each, with an attention_mask. A text longer than a row continues in further rows."""

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int):
        super().__init__(stream, sequence_length, padding_token)
        lengths = np.diff(stream.offsets)
        pieces = -(-lengths // sequence_length)
        self.documents = np.repeat(np.arange(len(lengths)), pieces)
        nth = np.arange(len(self.documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._starts = stream.offsets[:-1][self.documents] + nth * sequence_length
        self.sizes = np.minimum(lengths[self.documents] - nth * sequence_length, sequence_length)

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of the rows' tokens in the stream, and a mask of non-padding."""
        steps = np.arange(self.sequence_length)[None, :]
        return self._starts[indices][:, None] + steps, steps < self.sizes[indices][:, None]

    def _inputs(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        places, exists = self._places(indices)
        inputs = {"input_ids": self._take(places, exists), "attention_mask": exists.astype(np.int64)}
        if self.stream.segments is not None:
            inputs["token_type_ids"] = np.where(exists, self.stream.segments[np.where(exists, places, 0)], 0)
            inputs["token_type_ids"] = inputs["token_type_ids"].astype(np.int64)
        return inputs


class LabelledRows(TextRows):
    """Rows for classification. Labels are (len(indices),), the class of each text.

    Where the target of a text is k numbers, they are `scores`, (len(indices), k, 1) fp32, and labels are 0.
    """

    targets_are_tokens = False

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        assert self.stream.labels is not None  # ExampleEncoder is labelled
        labels = self.stream.labels[self.documents[indices]]
        if labels.ndim == 1:
            return RowArrays(self._inputs(indices), {"labels": labels.astype(np.int64)})
        # the last axis is none of tokens, which would be cut to the width of a batch
        targets = {"labels": np.zeros(len(labels), dtype=np.int64), "scores": labels[..., None].astype(np.float32)}
        return RowArrays(self._inputs(indices), targets)


class TaggedRows(TextRows):
    """Rows whose labels are the classes of some tokens, IGNORE_INDEX elsewhere."""

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        places, exists = self._places(indices)
        assert self.stream.tags is not None  # WordEncoder is tagged
        tags = self.stream.tags[np.where(exists, places, 0)].astype(np.int64)
        return RowArrays(self._inputs(indices), {"labels": np.where(exists, tags, IGNORE_INDEX)})

    @cached_property
    def num_targets(self) -> int:
        assert self.stream.tags is not None
        return int((self.stream.tags != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class Masking:
    """Masking of BERT (arXiv:1810.04805, section 3.1).

    Attributes:
        mask_token: id of the mask token.
        vocabulary_size: number of ids to draw random tokens from.
        special: ids that are never chosen.
        rate: probability that a token is chosen as a target.
        masked: fraction of the chosen tokens that become the mask token.
        random: fraction of the chosen tokens that become a random token. The rest stay unchanged.
    """

    mask_token: int
    vocabulary_size: int
    special: Sequence[int]
    rate: float = 0.15
    masked: float = 0.8
    random: float = 0.1


class MaskedRows(TextRows):
    """Rows with masked tokens. Labels are the original ids of the chosen tokens, IGNORE_INDEX elsewhere.

    In training the mask is drawn anew each time that a row is read. In an evaluation it is always the same.
    """

    def __init__(self, stream: TokenStream, sequence_length: int, padding_token: int, masking: Masking):
        super().__init__(stream, sequence_length, padding_token)
        self.masking = masking
        self.fingerprint = digest(self.fingerprint, *map(str, astuple(masking)))

    def __getitem__(self, indices: np.ndarray) -> RowArrays:
        return self.drawn(indices, np.asarray(indices), seed=0)

    def drawn(self, indices: np.ndarray, positions: np.ndarray, seed: int) -> RowArrays:
        masking, inputs = self.masking, self._inputs(indices)
        ids = inputs["input_ids"]
        candidates = (inputs["attention_mask"] > 0) & ~np.isin(ids, list(masking.special))
        which, how, what = (uniform(positions, self.sequence_length, seed, draw) for draw in range(3))
        chosen = candidates & (which < masking.rate)
        changed = np.where(how < masking.masked, masking.mask_token, (what * masking.vocabulary_size).astype(np.int64))
        inputs["input_ids"] = np.where(chosen & (how < masking.masked + masking.random), changed, ids)
        return RowArrays(inputs, {"labels": np.where(chosen, ids, IGNORE_INDEX)})

    @cached_property
    def num_targets(self) -> int:
        """Number of targets with the mask of an evaluation. In training the number differs from epoch to epoch."""
        return sum(int((labels != IGNORE_INDEX).sum()) for labels in self._all_labels())
