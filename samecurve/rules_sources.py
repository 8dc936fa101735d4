"""What `data.mixture` and `data.streaming` ask for, before any file is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .config import Data
from .documents import describe

Finding = tuple[str, str]
_OF_SFT = ("messages_column", "prompt_column", "completion_column")


def mixture(value: Callable[[str], Any], unreadable: Callable[[str, str], Iterator[Finding]]) -> Iterator[Finding]:
    """value: of a recipe's key. unreadable: a key and the path in it to what is wrong with that."""
    sources, task = value("data.mixture"), value("task")
    if sources is None:
        return
    if value("data.path") is not None:
        yield "data.mixture", f"given together with data.path ({value('data.path')}); set one of them to null"
    if value("data.group_by_length"):
        yield (
            "data.group_by_length",
            "found true, but the sources of data.mixture are not sorted together; set it to false",
        )
    if value("data.pattern") is not None:
        text = f"found {describe(value('data.pattern'))}, but data.mixture is given; write it beside the path it is for"
        yield "data.pattern", text
    known: dict[tuple, int] = {}
    for index, source in enumerate(sources):
        key = f"data.mixture.{index}"
        yield from unreadable(f"{key}.path", source["path"])
        yield from pattern(f"{key}.pattern", source.get("pattern"))
        identity = (str(Path(source["path"]).absolute()), source.get("pattern"))
        first = known.setdefault(identity, index)
        if first != index:
            text = f"found {source['path']}, which is data.mixture.{first} already; add its weight to that one"
            yield f"{key}.path", text
        for column in _OF_SFT if task != "sft" else ("text_column",):
            if source.get(column) is not None:
                reader = "only task sft reads" if task != "sft" else "task sft does not read"
                yield f"{key}.{column}", f"found {describe(source[column])}, but {reader} it and task is {task}"


def streaming(value: Callable[[str], Any]) -> Iterator[Finding]:
    size = value("data.shuffle_buffer_mib")
    if not value("data.streaming"):
        if size != Data.model_fields["shuffle_buffer_mib"].default:
            yield "data.shuffle_buffer_mib", f"found {size:g}, but data.streaming is false; all rows are shuffled then"
        return
    if value("data.mixture") is not None:
        yield "data.streaming", "found true, but data.mixture is given; only one data set can be streamed yet"
    if value("data.group_by_length"):
        yield "data.group_by_length", "found true, but rows of a stream are not known ahead; set it to false"
    if value("data.num_workers"):
        text = f"found {value('data.num_workers')}, but the rows of a stream are made in the background already, and "
        yield "data.num_workers", text + "each worker would tokenise all of it; set it to 0"
    if value("tokenizer.vocabulary_size") is not None:
        text = f"found {value('tokenizer.vocabulary_size')}, but a stream is not read before training; set it to "
        yield "tokenizer.vocabulary_size", text + "null, and tokenizer.path to a tokenizer"


def pattern(key: str, found: str | None) -> Iterator[Finding]:
    if found and (".." in Path(found).parts or Path(found).is_absolute()):
        yield (
            key,
            f"found {describe(found)}, which leaves the folder; set {key.removesuffix('pattern')}path to the other one",
        )
