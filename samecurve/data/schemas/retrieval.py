"""Retrieval rows for contrastive training (anchor, positive, hard negatives): reads and encodes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from samecurve.data import sources
from samecurve.data.encoder import Encoded, Encoder
from samecurve.data.row_checks import nearest
from samecurve.data.schemas.classification import text_of
from samecurve.errors import DataError
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Part of the cache key: raise it when the same rows give other tokens.
_VERSION = 1


@dataclass(frozen=True)
class Match:
    """An anchor with its positive and its hard negatives. Its str() is the anchor.

    The str() decides what is held out. So all rows with the same anchor are on the same side of the held-out split.

    Attributes:
        place: location of the row, for messages.
        texts: anchor, positive, then the hard negatives if any.
    """

    place: str
    texts: tuple[str, ...]

    def __str__(self) -> str:
        return self.texts[0]


@dataclass(frozen=True)
class MatchSource(sources.TableSource):
    """Tables whose rows are matches. `columns` holds (key of the recipe, column) for each text, the anchor's first."""

    documents_are, a_line_is = "anchors and positives", "one anchor and its positive"
    columns_are_named_by = "data.anchor_column, data.positive_column and data.negative_columns"

    columns: tuple[tuple[str, str], ...] = ()

    @property
    def identity(self) -> str:
        return json.dumps(self.columns)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        return tuple(column for _, column in self.columns)

    def other_columns(self, row: dict) -> Iterator[dict[str, str]]:
        yield nearest(row, dict(self.columns[:2]))

    def reading(self, keys: dict[str, str]) -> MatchSource:
        return replace(self, columns=tuple((key, keys.get(key, column)) for key, column in self.columns))

    def texts(self, document: Match) -> list[str]:
        return list(document.texts)

    def read(self, place: str, row: dict) -> Match:
        _, positive, *negatives = texts = tuple(text_of(place, column, row) for _, column in self.columns)
        if positive in negatives:
            (_, right), (_, wrong) = self.columns[1], self.columns[2 + negatives.index(positive)]
            raise DataError(f"{place}: {right!r} and {wrong!r} are the same text; correct or remove the row")
        return Match(place, texts)


class MatchEncoder(Encoder):
    """Encodes each text with the tokenizer's own special tokens, truncated to `sequence_length` tokens.

    The texts of a row are concatenated, and segments give the text that a token is from. A row is left out if one of
    its texts holds no token.
    """

    counted = ("truncated_texts",)
    segmented = True
    ends_texts = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sequence_length: int):
        super().__init__(tokenizer)
        self._rust.enable_truncation(sequence_length)
        self.identity = digest(_VERSION, self.identity, sequence_length, "match")

    def encode(self, documents: list[Match]) -> list[Encoded]:
        encodings = iter(
            self._rust.encode_batch(
                [text for document in documents for text in document.texts], add_special_tokens=True
            )
        )
        return [self._joined([next(encodings) for _ in document.texts]) for document in documents]

    def _joined(self, encodings: list) -> Encoded:
        self.counts["truncated_texts"] += sum(bool(encoding.overflowing) for encoding in encodings)
        if any(all(encoding.special_tokens_mask) for encoding in encodings):
            return Encoded([], segments=[])
        ids = [token for encoding in encodings for token in encoding.ids]
        return Encoded(ids, segments=[nth for nth, encoding in enumerate(encodings) for _ in encoding.ids])
