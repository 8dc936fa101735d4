"""Retrieval rows for contrastive training (anchor, positive, hard negatives): reads and encodes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from samecurve.data import sources
from samecurve.data.encoder import SPECIAL, Encoded, TruncatingEncoder
from samecurve.data.row_checks import nearest
from samecurve.data.schemas.classification import text_of
from samecurve.errors import DataError
from samecurve.specs.data_names import Truncation
from samecurve.specs.row_formats import MATCHES, RowFormat, choice, fitting, named
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Part of the cache key: raise it when the same rows give other tokens.
_VERSION = 1


@dataclass(frozen=True)
class Match:
    """An anchor with its positive and its hard negatives.

    Attributes:
        place: location of the row, for messages.
        texts: anchor, positive, then the hard negatives if any.
    """

    place: str
    texts: tuple[str, ...]

    @property
    def split_key(self) -> str:
        return self.texts[0]

    def __str__(self) -> str:
        return "\0".join(self.texts)


@dataclass(frozen=True)
class MatchSource(sources.TableSource):
    """Tables whose rows are matches.

    A row of lists (BGE's format) becomes one row for each of its positives.

    Attributes:
        columns: (key of the recipe, column) for each text, the anchor's first.
        format: name of the format of rows; None: the row's columns say it.
        num_negatives: hard negatives that are read of a list.
        takes_first: whether a list may have more of them, of which the first are read.
    """

    documents_are, a_line_is = "anchors and positives", "one anchor and its positive"
    columns_are_named_by = "data.anchor_column, data.positive_column and data.negative_columns"

    columns: tuple[tuple[str, str], ...] = ()
    format: str | None = None
    num_negatives: int = 0
    takes_first: bool = False

    @property
    def identity(self) -> str:
        return json.dumps([self.columns, self.format, self.num_negatives, self.takes_first])

    def _format_of(self, row: dict) -> RowFormat:
        """Return the format of a row; that of texts in `columns` where no other fits."""
        named_columns = tuple(column for _, column in self.columns)
        texts = RowFormat("match", MATCHES, named_columns, "match")
        if named_columns[:2] != ("anchor", "positive"):
            return replace(texts, name="")
        fit = [named(self.format)] if self.format else fitting(row, MATCHES)
        return next((known for known in fit if known.reader == "lists"), texts)

    def columns_read(self, row: dict) -> tuple[str, ...]:
        known = self._format_of(row)
        return (*known.columns, *known.optional)

    def format_name(self, row: dict) -> str:
        return self._format_of(row).name

    def other_columns(self, row: dict) -> Iterator[dict[str, str]]:
        yield nearest(row, dict(self.columns[:2]))

    def reading(self, keys: dict[str, str]) -> MatchSource:
        return replace(self, columns=tuple((key, keys.get(key, column)) for key, column in self.columns))

    def texts(self, document: Match) -> list[str]:
        return list(document.texts)

    def _rows(self) -> Iterator[tuple[str, dict | DataError]]:
        for place, row in super()._rows():
            positives, column = None, ""
            if isinstance(row, dict) and (known := self._format_of(row)).reader == "lists":
                column = known.columns[1]
                positives = row.get(column)
            if isinstance(row, dict) and isinstance(positives, list) and positives:
                yield from ((place, {**row, column: text}) for text in positives)
            else:
                yield place, row

    def read(self, place: str, row: dict) -> Match:
        known = self._format_of(row)
        if self.format is None and known.name and len(fit := fitting(row, MATCHES)) > 1:
            raise DataError(f"{place}: {choice(fit)}")
        columns, said = list(known.columns), dict(row)
        if known.reader == "lists":
            (name,) = known.optional
            negatives, wanted = row.get(name) or [], self.num_negatives
            if not isinstance(negatives, list):
                raise DataError(
                    f"{place}: {name!r} is {negatives!r:.40}, not a list of texts; correct or remove the row"
                )
            if len(negatives) < wanted or (len(negatives) > wanted and not self.takes_first):
                why = f"data.num_negatives is {wanted}" if self.takes_first else f"the first row has {wanted}"
                raise DataError(
                    f"{place}: {name!r} has {len(negatives)} texts, but {why}; set data.num_negatives to a number that "
                    "all rows have, of which the first are read, or remove the row"
                )
            said |= {f"{name}[{nth}]": text for nth, text in enumerate(negatives)}
            columns += [f"{name}[{nth}]" for nth in range(wanted)]
        _, positive, *negatives = texts = tuple(text_of(place, column, said) for column in columns)
        if positive in negatives:
            wrong = columns[2 + negatives.index(positive)]
            raise DataError(f"{place}: {columns[1]!r} and {wrong!r} are the same text; correct or remove the row")
        return Match(place, texts)


class MatchEncoder(TruncatingEncoder):
    """Encodes each text with the tokenizer's own special tokens, truncated to `sequence_length` tokens.

    The texts of a row are concatenated, and segments give the text that a token is from. A row is left out if one of
    its texts holds no token.
    """

    counted = ("truncated_texts", "too_long_documents", SPECIAL)
    segmented = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sequence_length: int, truncation: Truncation = "right"):
        super().__init__(tokenizer, sequence_length, truncation)
        self.identity = digest(_VERSION, self.identity, "match")

    def encode(self, documents: list[Match]) -> list[Encoded]:
        self._count_special("\0".join(document.texts) for document in documents)
        encodings = iter(
            self._rust.encode_batch(
                [text for document in documents for text in document.texts], add_special_tokens=True
            )
        )
        encoded = []
        for document in documents:
            own = [next(encodings) for _ in document.texts]
            stays = self._stays(document.place, [encoding.overflowing for encoding in own])
            if not stays or any(all(encoding.special_tokens_mask) for encoding in own):
                encoded.append(Encoded([], segments=[]))
                continue
            ids = [token for encoding in own for token in encoding.ids]
            encoded.append(Encoded(ids, segments=[nth for nth, encoding in enumerate(own) for _ in encoding.ids]))
        return encoded
