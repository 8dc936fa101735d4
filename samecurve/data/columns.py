"""Which columns of a table, and which keys of its messages, are read, and which content would be lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from samecurve.errors import DataError

# Names of content in public formats of rows and of messages (TRL, OpenAI, LLaMA-Factory, axolotl, ms-swift).
CONTENT = frozenset(
    "answer audio audios chat_template_kwargs chosen completion context conversation conversations documents "
    "function_call functions history image images input instruction messages output prompt query question reasoning "
    "reasoning_content rejected response system system_prompt thinking thoughts tool_calls tools train_detail video "
    "videos".split()
)
CONTENT_WORDS = 5  # a text of so many words is no id, label, link or short category
# Keys of a message that messages.py reads, and those that only name something.
_KEYS_READ = set(
    "role content from value parts weight train loss loss_weight loss_scale tool_calls function_call name tool_call_id "
    "id".split()
)
_SHOWN_COLUMNS = 12


@dataclass
class Unread:
    """Counts of a column, or of a key of messages, that is not read.

    Attributes:
        num: number of rows, or messages, that have a value.
        repeats: number of them whose value only repeats what is read.
        texts: number of the others whose value has a text of CONTENT_WORDS words.
    """

    num: int = 0
    repeats: int = 0
    texts: int = 0

    def add(self, value: object, read: Collection[str]) -> None:
        self.num += 1
        said, size = set(_texts(value)), sum(map(len, read))
        # as words: "2" in "it is 2.", and not "x" in "text"
        if said and all(
            any(text in whole and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", whole) for whole in read)
            for text in said
        ):
            self.repeats += 1
        # mostly made of all the texts read, such as a rendered prompt with its answer
        elif read and any(2 * size > len(text) and all(part in text for part in read) for text in said):
            self.repeats += 1
        elif any(len(text.split(maxsplit=CONTENT_WORDS)) >= CONTENT_WORDS for text in said):
            self.texts += 1

    def is_content(self, name: str) -> bool:
        own = self.num - self.repeats
        # a column that mostly repeats others, such as a rendered prompt, may differ in the white space of some rows
        return own > self.repeats and (name in CONTENT or 2 * self.texts > own)


@dataclass
class Columns:
    """Counts over the rows of a table.

    Attributes:
        num_rows: number of rows.
        formats: number of rows by the name of their format, see specs/row_formats.py.
        read: by column that is read, the number of rows with a value.
        unread: counts by column that is not read.
        keys: counts by key of messages that `schemas/messages.py` does not read; the chat template may.
    """

    num_rows: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    unread: dict[str, Unread] = field(default_factory=dict)
    keys: dict[str, Unread] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: dict) -> Columns:
        """Return what `asdict` stored."""
        unread, keys = (
            {name: Unread(**counts) for name, counts in stored[part].items()} for part in ("unread", "keys")
        )
        return cls(stored["num_rows"], stored["formats"], stored["read"], unread, keys)

    as_dict = asdict

    def add(self, row: dict[str, Any], read: Collection[str], name: str = "") -> None:
        """Count a row of which the columns `read` are read; `name`: its format."""
        self.num_rows += 1
        if name:
            self.formats[name] = self.formats.get(name, 0) + 1
        said: list[str] | None = None
        for column, value in row.items():
            if _is_empty(value):
                continue
            if column in read:
                self.read[column] = self.read.get(column, 0) + 1
                for message in _messages(value):
                    for key, content in message.items():
                        if key not in _KEYS_READ and not _is_empty(content):
                            self.keys.setdefault(key, Unread()).add(content, ())
            else:
                if said is None:
                    said = [text for name in read if name in row for text in _texts(row[name])]
                self.unread.setdefault(column, Unread()).add(value, said)

    def describe(self) -> str:
        """Return "FORMAT: columns; not read: ..." for the header; "" for data without columns."""
        if not self.read:
            return ""
        known = " and ".join(
            f"{name} ({num:,} rows)" if len(self.formats) > 1 else name for name, num in self.formats.items()
        )
        unread = [f"{name} ({rows_have_one(counts.num)})" for name, counts in self.unread.items()]
        more = len(unread) - _SHOWN_COLUMNS
        unread = unread[:_SHOWN_COLUMNS] + ([f"and {more} more"] if more > 0 else [])
        return f"{known or 'read'}: {', '.join(self.read)}" + (f"; not read: {', '.join(unread)}" if unread else "")

    def refuse_lost_content(
        self, name: str, ignored: Iterable[str], advice: str = "", reads: Callable[[str], bool] | None = None
    ) -> None:
        """Raise one DataError for all content that would be lost, and for ignored columns that are read.

        Args:
            advice: a way to read the columns, for the message.
            reads: whether the chat template reads a key of a message; None: keys are not checked.
        """
        read, problems = ", ".join(self.read), []
        for column in self.read.keys() & set(ignored):
            text = (
                f"{name}: data.ignore_columns names {column!r}, which is read (columns read: {read}); remove it from "
            )
            problems.append(f"{text}the list, or remove the column from the data")
        columns = {c: counts for c, counts in self.unread.items() if counts.is_content(c) and c not in ignored}
        if columns:
            lost = ", ".join(f"{column} ({rows_have_one(counts.num)})" for column, counts in columns.items())
            problems.append(
                f"{name}: columns with content are not read: {lost}; columns read: {read}; "
                f"{advice or 'move the content into columns that are read'}, or set "
                f"data.ignore_columns=[{','.join(columns)}] to train without it"
            )
        for key, counts in self.keys.items():
            if reads and counts.is_content(key) and key not in ignored and not reads(key):
                text = f"{name}: {counts.num:,} messages have {key!r}, which the chat template does not read; set "
                text += "tokenizer.chat_template to a template that does, or set "
                problems.append(f"{text}data.ignore_columns=[{key}] to train without it")
        if problems:
            raise DataError("\n".join(problems))


def rows_have_one(count: int) -> str:
    return "1 row has one" if count == 1 else f"{count:,} rows have one"


def _is_empty(value: object) -> bool:
    return value is None or value in ("", [], {})


def _messages(value: object) -> Iterator[dict]:
    """Yield the messages of a column. A part of reasoning counts as the key that messages.py makes of it."""
    for message in value if isinstance(value, list) else ():
        if not isinstance(message, dict) or not ("role" in message or "from" in message):
            continue
        parts = message.get("content")
        if isinstance(parts, list):
            kinds = ("reasoning", "thinking")  # LLaMA-Factory's and Anthropic's
            thoughts = [part for part in parts if isinstance(part, dict) and part.get("type") in kinds]
            texts = [part.get("thinking", part.get("value", part.get("text"))) for part in thoughts]
            yield {**message, "reasoning_content": texts}
        else:
            yield message


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in a value."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
