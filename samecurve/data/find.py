"""Finds the source of each kind of document behind `data.path`: files, a hub data set, or a built-in data set."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from samecurve.data import sources
from samecurve.data.builtin import DocstringSource, FunctionSource, ModuleSource, PreferenceSource
from samecurve.data.schemas.classification import ExampleSource
from samecurve.data.schemas.conversation import ChatSchema, ConversationSource
from samecurve.data.schemas.preference import PairSchema, PairSource
from samecurve.data.schemas.retrieval import MatchSource
from samecurve.specs.data_names import DOCSTRINGS, FUNCTIONS, MODULES, PREFERENCES

if TYPE_CHECKING:
    from samecurve.config.schema import Data


def find_conversations(
    name: str, pattern: str | None, schema: ChatSchema, selection: sources.Selection = sources.WHOLE
) -> ConversationSource:
    """Find the conversations of `data.path`. Raises as `sources.find_source` does.

    Args:
        name: the value of `data.path`.
        pattern: glob within a folder or a repository of the hub, None for all data files.
        schema: columns of a conversation.
        selection: part of the data set.
    """
    if name == FUNCTIONS:
        return FunctionSource(name, sources.builtin_files())
    files = sources.find_source(name, pattern, selection=selection).files
    return ConversationSource(name, files, schema=schema, selection=selection)


def find_pairs(
    name: str, pattern: str | None, schema: PairSchema, selection: sources.Selection = sources.WHOLE
) -> PairSource:
    """Find the preference pairs of `data.path`. Raises as `sources.find_source` does.

    Args:
        name: the value of `data.path`.
        pattern: glob within a folder or a repository of the hub, None for all data files.
        schema: columns of a pair.
        selection: part of the data set.
    """
    if name == PREFERENCES:
        return PreferenceSource(name, sources.builtin_files())
    files = sources.find_source(name, pattern, selection=selection).files
    return PairSource(name, files, schema=schema, selection=selection)


def find_examples(data: Data, names: tuple[str, ...] | None, selection: sources.Selection) -> ExampleSource:
    """Find the labelled texts of `data.path`. Raises as `sources.find_source` does.

    `names` are the class names, None if they are not known yet.
    """
    name = data.path
    assert name is not None  # classify takes no mixture
    if name == MODULES:
        return ModuleSource(name, sources.builtin_files())
    files = sources.find_source(name, data.pattern, selection=selection).files
    columns = data.text_column, data.text_pair_column, data.label_column
    return ExampleSource(name, files, *columns, names, selection=selection)


def find_matches(name: str, data: Data, selection: sources.Selection = sources.WHOLE) -> MatchSource:
    """Find the anchors and candidates of `data.path`. Raises as `sources.find_source` does.

    The first row is read, and a broken first file raises its DataError.
    """
    if name == DOCSTRINGS:
        return DocstringSource(name, sources.builtin_files())
    files = sources.find_source(name, data.pattern, selection=selection).files
    rows = (row for _, row in sources.table_rows(files[0], MatchSource.documents_are) if isinstance(row, dict))
    first = next(rows, {})  # decides on the negatives of all rows
    negatives = _negative_columns(first) if data.negative_columns is None else data.negative_columns
    columns = [("anchor_column", data.anchor_column), ("positive_column", data.positive_column)]
    columns += [("negative_columns", column) for column in negatives]
    number, listed = data.num_negatives, first.get("neg") or []
    number = number if number is not None else len(listed) if isinstance(listed, list) else 0
    rest = data.format, number, data.num_negatives is not None
    return MatchSource(name, files, "text", tuple(columns), *rest, selection=selection)


def _negative_columns(row: dict) -> list[str]:
    """Return the columns negative, negative_1, negative_2, ... of a row."""
    names = map(str, row)
    numbers = {name: int(match[1] or 0) for name in names if (match := re.fullmatch(r"negative(?:_(\d+))?", name))}
    return sorted(numbers, key=numbers.__getitem__)
