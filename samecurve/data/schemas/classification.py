"""Labelled texts for sequence classification: reads them from rows of tables, and encodes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.data import hub, sources
from samecurve.data.encoder import SPECIAL, Encoded, Encoder, TruncatingEncoder
from samecurve.data.formats import check_characters, no_column
from samecurve.data.row_checks import nearest
from samecurve.errors import DataError
from samecurve.specs.data_names import ProblemType, Truncation
from samecurve.storage.cache import build_once, digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Part of the cache key: raise it when the same rows give other class names.
_VERSION = 3
_SHOWN_NAMES = 8
_FILE = "names.json"


@dataclass(frozen=True)
class Example:
    """A text, or a pair of texts, with the name of its class. A label that is an integer is its own name.

    Attributes:
        place: location of the row, for messages.
        text: the text, or the first one of the pair.
        pair: the second text, None if there is none.
        label: name of the class; by ExampleSource.problem_type also the names of several, or a number.
    """

    place: str
    text: str
    pair: str | None
    label: str | tuple[str, ...] | float

    @property
    def split_key(self) -> str:
        return self.text

    def __str__(self) -> str:
        return self.text if self.pair is None else f"{self.text}\0{self.pair}"


@dataclass(frozen=True)
class ExampleSource(sources.TableSource):
    """Tables whose rows are labelled texts.

    Attributes:
        pair_column: column of the second text, None if there is none.
        label_column: column of the label.
        names: class names in order; None if they are not known yet, in which case any label is accepted.
        problem_type: what a label is, see Classify.problem_type.
    """

    documents_are, a_line_is = "labelled texts", "one text and its label"
    columns_are_named_by = "data.text_column, data.text_pair_column and data.label_column"

    pair_column: str | None = None
    label_column: str = "label"
    names: tuple[str, ...] | None = None
    problem_type: ProblemType = "single_label"

    @property
    def identity(self) -> str:
        other = [self.problem_type] if self.problem_type != "single_label" else []
        return json.dumps([self.text_column, self.pair_column, self.label_column, self.names, *other])

    def columns_read(self, row: dict) -> tuple[str, ...]:
        return (self.text_column, self.label_column, *([] if self.pair_column is None else [self.pair_column]))

    def other_columns(self, row: dict) -> Iterator[dict[str, str]]:
        pair = {} if self.pair_column is None else {"text_pair_column": self.pair_column}
        yield nearest(row, {"text_column": self.text_column, **pair, "label_column": self.label_column})

    def reading(self, keys: dict[str, str]) -> ExampleSource:
        return replace(self, **{key.replace("text_pair", "pair"): column for key, column in keys.items()})

    def texts(self, document: Example) -> list[str]:
        return [document.text, *([] if document.pair is None else [document.pair])]

    def read(self, place: str, row: dict) -> Example:
        text = text_of(place, self.text_column, row)
        pair = None if self.pair_column is None else text_of(place, self.pair_column, row)
        if self.label_column not in row:
            raise no_column(place, row, repr(self.label_column))
        label = row[self.label_column]
        if self.problem_type == "single_label":
            return Example(place, text, pair, self._name(place, label))
        if self.problem_type == "multi_label":
            if not isinstance(label, list):
                wrong = f"{label!r:.40}, not a list of classes; write one, [] where none fits"
                raise DataError(f"{place}: {self.label_column!r} is {wrong}")
            names = tuple(self._name(place, name) for name in label)
            if len(set(names)) < len(names):
                wrong = f"{label!r:.40}, with a class twice; write the name or number of each class once"
                raise DataError(f"{place}: {self.label_column!r} is {wrong} (for [0, 0, 1] write [2])")
            return Example(place, text, pair, names)
        highest = 1.0 if self.problem_type == "relevance" else math.inf
        try:
            number = float(label)  # a csv file has numbers as text
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and (highest > 1 or 0 <= number <= 1)):
            wanted = "a number from 0 to 1" if highest == 1 else "a number"
            raise DataError(f"{place}: {self.label_column!r} is {label!r:.40}, not {wanted}; correct or remove the row")
        return Example(place, text, pair, number)

    @cached_property
    def _are_names(self) -> bool:
        """Whether whole numbers are names of classes, not their places: data.labels has numbers, as 1 to 5 stars.

        A ClassLabel's numbers are places whatever its names are.
        """
        splits = (file for file in self.files if isinstance(file, hub.Split))
        is_class_label = any(split.class_names(self.label_column) for split in splits)
        return not is_class_label and any(name.isdecimal() for name in self.names or ())

    def _name(self, place: str, label: Any) -> str:
        """Return the class name of a label. Raises DataError for one that is not a name or number of a class."""
        at = f"{place}: {self.label_column!r}"
        # A csv file has numbers as text.
        if isinstance(label, str) and self.names is not None and label not in self.names and label.isdecimal():
            label = int(label)
        if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
            raise DataError(f"{at} is {label!r:.40}, not a name or a whole number; correct or remove the row")
        if isinstance(label, int) and self._are_names:
            label = str(label)
        if isinstance(label, int):
            number_of_classes = None if self.names is None else len(self.names)
            if label < 0 or (number_of_classes is not None and label >= number_of_classes):
                highest = "" if number_of_classes is None else f" to {number_of_classes - 1}"
                raise DataError(f"{at} is {label}, but classes are numbered from 0{highest}; {_FIX}")
            return str(label) if self.names is None else self.names[label]
        check_characters(place, self.label_column, label)
        if self.names is not None and label not in self.names:
            more = len(self.names) - _SHOWN_NAMES
            listed = ", ".join(self.names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
            raise DataError(f"{at} is {label!r:.40}, which is not one of the classes {listed}; {_FIX}")
        return label


_FIX = "correct or remove the row, or name all classes in data.labels"


def class_names(source: ExampleSource, cache: Path) -> tuple[str, ...]:
    """Find the class names of a source, sorted by name or by number. The result is cached.

    A data set of the hub may have names for its numbers (datasets.ClassLabel); these count, in its order.

    Raises:
        DataError: for rows that cannot be used, for labels that mix names and numbers, for numbers with a gap, and for
            a single class.
    """
    for file in source.files:
        if isinstance(file, hub.Split) and (names := file.class_names(source.label_column)):
            return names
    key = digest(_VERSION, sources.fingerprint(source, cache), source.identity)
    return build_once(
        cache / "classes" / key,
        lambda entry: entry.write(_FILE, json.dumps(_read_names(source)).encode()),
        lambda entry: tuple(json.loads(entry.read(_FILE))),
    )


def _read_names(source: ExampleSource) -> list[str]:
    source.check()
    first: dict[str, str] = {}
    for example in source.documents():
        assert not isinstance(example.label, float)  # numbers have no names
        for name in (example.label,) if isinstance(example.label, str) else example.label:
            first.setdefault(name, example.place)
    names = sorted(first)
    numbers = [name for name in names if name.isdecimal()]
    if numbers and len(numbers) < len(names):
        word = next(name for name in names if not name.isdecimal())
        raise DataError(
            f"{source.name}: the labels mix numbers ({numbers[0]} in {first[numbers[0]]}) and names ({word!r} in "
            f"{first[word]}); use only one of the two"
        )
    if numbers:
        names = sorted(names, key=int)
        missing = next((str(n) for n in range(int(names[-1])) if str(n) not in first), None)
        if missing is not None:
            last = names[-1]
            raise DataError(
                f"{first[last]}: the label is {last}, but no row has the label {missing}; number the classes from 0 "
                "without a gap, or name all of them in data.labels"
            )
    if not names:
        raise DataError(f"{source.name}: no row has a class; name all classes in data.labels")
    if len(names) < 2 and source.problem_type == "single_label":
        raise DataError(
            f"{source.name}: every row has the label {names[0]!r}, but a classifier needs two classes; add rows of "
            "another class, or name all classes in data.labels"
        )
    return names


class ExampleEncoder(TruncatingEncoder):
    """Encodes a text or a pair with the tokenizer's own special tokens, truncated to `sequence_length` tokens.

    The tokens are those of transformers' text-classification pipeline. Special tokens within a text are encoded as
    text.
    """

    counted = ("truncated_documents", "too_long_documents", SPECIAL)
    labelled = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        sequence_length: int,
        names: tuple[str, ...],
        pairs: bool,
        truncation: Truncation = "right",
    ):
        """Create the encoder.

        Args:
            sequence_length: largest number of tokens of a row, special tokens included.
            names: class names; a class's id is its index. Labels of several classes become one number, 0 or 1, for
                each class, labels that are numbers stay as they are.
            pairs: whether rows hold two texts. Models that take token_type_ids then get them.
        """
        super().__init__(tokenizer, sequence_length, truncation)
        self._index = {name: index for index, name in enumerate(names)}
        self.segmented = pairs and "token_type_ids" in tokenizer.model_input_names
        self.identity = digest(_VERSION, self.identity, names, self.segmented)

    def encode(self, documents: list[Example]) -> list[Encoded]:
        inputs = [d.text if d.pair is None else (d.text, d.pair) for d in documents]
        self._count_special(map(str, documents))
        encodings = self._rust.encode_batch(inputs, add_special_tokens=True)
        encoded = []
        for document, encoding in zip(documents, encodings, strict=True):
            if not self._stays(document.place, [encoding.overflowing]):
                encoded.append(Encoded([]))
                continue
            if isinstance(document.label, str):
                label: int | list[float] = self._index[document.label]
            elif isinstance(document.label, tuple):
                label = [float(name in document.label) for name in self._index]
            else:
                label = [document.label]
            segments = encoding.type_ids if self.segmented else None
            encoded.append(Encoded(encoding.ids, segments=segments, label=label))
        return encoded


class WholeTextEncoder(Encoder):
    """Encodes a plain text with the tokenizer's own special tokens, untruncated, for masked language models."""

    ends_texts = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        super().__init__(tokenizer)
        self.identity = digest(_VERSION, self.identity, "whole")

    def encode(self, documents: list[str]) -> list[Encoded]:
        self._count_special(documents)
        encodings = self._rust.encode_batch(documents, add_special_tokens=True)
        return [Encoded([] if all(e.special_tokens_mask) else e.ids) for e in encodings]


def text_of(place: str, column: str, row: dict) -> str:
    """Return the text in a column.

    Raises:
        DataError: if the column is missing, empty or not text.
    """
    text = sources.text_of(place, row, column, "add it, or remove the row")
    if not text.strip():
        raise DataError(f"{place}: {column!r} is empty; fill or remove the row")
    return text
