"""Words with a class each, and solutions with a label for each step: reads them from rows of tables, encodes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from samecurve.data.encoder import Encoded, TruncatingEncoder
from samecurve.data.formats import check_characters, no_column
from samecurve.data.row_checks import nearest
from samecurve.data.schemas.classification import ExampleSource, text_of
from samecurve.errors import DataError
from samecurve.losses.cross_entropy import IGNORE_INDEX
from samecurve.specs.data_names import Truncation
from samecurve.storage.cache import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_VERSION = 2  # part of the cache key: raise it when the same rows give other tokens or labels
STEP_NAMES = ("wrong", "right")


@dataclass(frozen=True)
class LabelledWords:
    """Words, or the steps of a solution, with the name of the class of each.

    Attributes:
        place: location of the row, for messages.
        words: words, or steps.
        label: their classes.
        prompt: the task that the steps solve, None for words.
    """

    place: str
    words: tuple[str, ...]
    label: tuple[str, ...]
    prompt: str | None = None

    @property
    def split_key(self) -> str:
        return self.prompt or ""

    def __str__(self) -> str:
        return "\0".join([*([] if self.prompt is None else [self.prompt]), *self.words])


@dataclass(frozen=True)
class LabelledWordsSource(ExampleSource):
    """Tables whose rows are lists of words and of their labels. Of steps, text_column is the prompt.

    Attributes:
        words_column: column of the words, or steps.
        steps: whether rows are solutions in steps, whose labels are true or false.
    """

    documents_are, a_line_is = "labelled words", "a list of words and a list of their labels"
    columns_are_named_by = "data.words_column and data.label_column (and of steps data.text_column, the prompt)"

    words_column: str = "tokens"
    steps: bool = False

    @property
    def identity(self) -> str:
        return json.dumps([super().identity, self.words_column, self.steps])

    def columns_read(self, row: dict) -> tuple[str, ...]:
        return (self.words_column, self.label_column, *([self.text_column] if self.steps else []))

    def other_columns(self, row: dict) -> Iterator[dict[str, str]]:
        prompt = {"text_column": self.text_column} if self.steps else {}
        yield nearest(row, {**prompt, "words_column": self.words_column, "label_column": self.label_column})

    def reading(self, keys: dict[str, str]) -> LabelledWordsSource:
        return replace(self, **keys)

    def texts(self, document: LabelledWords) -> list[str]:
        return [*([] if document.prompt is None else [document.prompt]), " ".join(document.words)]

    def read(self, place: str, row: dict) -> LabelledWords:
        words, labels = words_of(place, self.words_column, row), row.get(self.label_column)
        if self.label_column not in row:
            raise no_column(place, row, repr(self.label_column))
        if not isinstance(labels, list) or len(labels) != len(words):
            number = len(labels) if isinstance(labels, list) else "no list"
            raise DataError(
                f"{place}: {self.words_column!r} has {len(words)} values, but {self.label_column!r} has {number}; "
                "write one label for each"
            )
        if not self.steps:
            return LabelledWords(place, words, tuple(self._name(place, label) for label in labels))
        if wrong := [label for label in labels if label not in (0, 1)]:  # False == 0
            raise DataError(f"{place}: {self.label_column!r} has {wrong[0]!r:.40}; write true or false for each step")
        prompt = text_of(place, self.text_column, row)
        return LabelledWords(place, words, tuple(STEP_NAMES[int(label)] for label in labels), prompt)


def words_of(place: str, column: str, row: dict) -> tuple[str, ...]:
    """Return the words in a column. Raises DataError for anything but a list of texts, none of them empty."""
    if column not in row:
        raise no_column(place, row, repr(column))
    words = row[column]
    if not isinstance(words, list) or not words:
        raise DataError(f"{place}: {column!r} is {words!r:.40}, not a list of texts; correct or remove the row")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise DataError(f"{place}: {column!r} has {word!r:.40} in it, which is no text; correct or remove the row")
        check_characters(place, column, word)
    return tuple(words)


class WordEncoder(TruncatingEncoder):
    """Labels the first token of each word, as transformers' examples do. The others have no label."""

    counted = ("truncated_documents", "too_long_documents")
    tagged = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        sequence_length: int,
        names: tuple[str, ...],
        truncation: Truncation = "right",
    ):
        super().__init__(tokenizer, sequence_length, truncation)
        self._index = {name: index for index, name in enumerate(names)}
        # The words of a byte-level tokenizer begin with their space. Others have it from the tokenizer itself.
        whole = self._rust.encode("a a", add_special_tokens=False)
        words = self._rust.encode(["a", "a"], is_pretokenized=True, add_special_tokens=False)
        self._before = "" if words.ids == whole.ids else " "
        self.identity = digest(_VERSION, self.identity, names)

    def encode(self, documents: list[LabelledWords]) -> list[Encoded]:
        encoded = []
        for document, (ids, places, is_longer) in zip(documents, self.placed(documents), strict=True):
            if not self._stays(document.place, [is_longer]):
                encoded.append(Encoded([]))
                continue
            tags = np.full(len(ids), IGNORE_INDEX)
            for word, place in places.items():
                tags[place] = self._index[document.label[word]]
            encoded.append(Encoded(ids, tags=tags))
        return encoded

    def placed(self, documents: list[LabelledWords]) -> Iterator[tuple[list[int], dict[int, int], bool]]:
        """Yield for each document (ids, {index of a word: index of its labelled token}, whether it was longer)."""
        texts = [[f"{self._before * (n > 0)}{word}" for n, word in enumerate(d.words)] for d in documents]
        for encoding in self._rust.encode_batch(texts, is_pretokenized=True, add_special_tokens=True):
            places: dict[int, int] = {}
            for place, word in enumerate(encoding.word_ids):
                if word is not None:
                    places.setdefault(word, place)
            yield encoding.ids, places, bool(encoding.overflowing)


class StepEncoder(WordEncoder):
    """Labels the last token of the separator behind each step: the tokens of TRL's PRMTrainer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        sequence_length: int,
        separator: str,
        truncation: Truncation = "right",
    ):
        super().__init__(tokenizer, sequence_length, STEP_NAMES, truncation)
        self._rust.no_truncation()
        self._rust.encode_special_tokens = False  # the separator may be a token of its own, such as <extra_0>
        self._separator = self._rust.encode(separator, add_special_tokens=False).ids
        self._rust.encode_special_tokens = True
        self.identity = digest(self.identity, self._separator)

    def placed(self, documents: list[LabelledWords]) -> Iterator[tuple[list[int], dict[int, int], bool]]:
        for document in documents:
            assert document.prompt is not None  # LabelledWordsSource.steps
            texts = self._rust.encode_batch([document.prompt, *document.words], add_special_tokens=False)
            ids, places = [*self._begin, *texts[0].ids], {}
            for step, text in enumerate(texts[1:]):
                ids += [*text.ids, *self._separator]
                places[step] = len(ids) - 1
            skipped = max(len(ids) - self._length, 0) if self._truncation == "left" else 0
            kept = ids[skipped : skipped + self._length]
            inside = {step: place - skipped for step, place in places.items() if 0 <= place - skipped < len(kept)}
            yield kept, inside, len(ids) > self._length
