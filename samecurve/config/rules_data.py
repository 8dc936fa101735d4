"""What `data.mixture` and `data.streaming` ask for, before any file is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from samecurve.config.documents import describe
from samecurve.config.schema import Data
from samecurve.specs.data_names import address, is_hub_name

Finding = tuple[str, str]
_HUB_KEYS = {"split": "train", "config": None, "revision": None}
_OF_SFT = ("messages_column", "prompt_column", "completion_column")


def in_mixture(index: int) -> tuple[Callable[[Callable[[str], Any]], Iterator[Finding]], ...]:
    """The rules of one source of data.mixture; a path's own is not among them."""
    key = f"data.mixture.{index}"
    columns = (partial(_column, index, column) for column in ("text_column", *_OF_SFT))
    parts = (partial(_part_of_the_hub, key, part, default) for part, default in _HUB_KEYS.items())
    return (
        *(partial(pattern, f"{key}.pattern"), partial(_again, index), partial(_within_output_dir, f"{key}.path")),
        *columns,
        *parts,
    )


def _again(index: int, value: Callable[[str], Any]) -> Iterator[Finding]:
    def identity(nth: int) -> tuple:
        source = f"data.mixture.{nth}"
        parts = (value(f"{source}.{key}") for key in _HUB_KEYS)
        return str(Path(value(f"{source}.path")).absolute()), value(f"{source}.pattern"), *parts

    for first in range(index):
        with contextlib.suppress(KeyError):
            if identity(first) == identity(index):
                text = f"found {value(f'data.mixture.{index}.path')}, which is data.mixture.{first} already"
                yield f"data.mixture.{index}.path", f"{text}; add its weight to that one"
                return


def _column(index: int, column: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    key, task = f"data.mixture.{index}.{column}", value("task")
    if value(key) is not None and (task == "sft") != (column in _OF_SFT):
        reader = "only task sft reads" if task != "sft" else "task sft does not read"
        yield key, f"found {describe(value(key))}, but {reader} it and task is {task}"


def _path_and_mixture(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.mixture") is not None and value("data.path") is not None:
        yield "data.mixture", f"given together with data.path ({value('data.path')}); set one of them to null"


def _mixture_by_length(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.mixture") is not None and value("data.group_by_length"):
        text = "found true, but the sources of data.mixture are not sorted together; set it to false"
        yield "data.group_by_length", text


def _in_place_of_mixture(key: str, default: str | None, value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.mixture") is not None and value(f"data.{key}") != default:
        text = f"found {describe(value(f'data.{key}'))}, but data.mixture is given; write it beside the path it is for"
        yield f"data.{key}", text


def _idle_buffer(value: Callable[[str], Any]) -> Iterator[Finding]:
    size = value("data.shuffle_buffer_mib")
    if not value("data.streaming") and size != Data.model_fields["shuffle_buffer_mib"].default:
        yield "data.shuffle_buffer_mib", f"found {size:g}, but data.streaming is false; all rows are shuffled then"


def _stream_of_mixture(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.streaming") and value("data.mixture") is not None:
        yield "data.streaming", "found true, but data.mixture is given; only one data set can be streamed yet"


def _stream_by_length(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.streaming") and value("data.group_by_length"):
        yield "data.group_by_length", "found true, but rows of a stream are not known ahead; set it to false"


def _workers_of_stream(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.streaming") and value("data.num_workers"):
        text = f"found {value('data.num_workers')}, but the rows of a stream are made in the background already, and "
        yield "data.num_workers", text + "each worker would tokenise all of it; set it to 0"


def _vocabulary_of_stream(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.streaming") and value("tokenizer.vocabulary_size") is not None:
        text = f"found {value('tokenizer.vocabulary_size')}, but a stream is not read before training; set it to "
        yield "tokenizer.vocabulary_size", text + "null, and tokenizer.path to a tokenizer"


def _part_of_the_hub(block: str, key: str, default: str | None, value: Callable[[str], Any]) -> Iterator[Finding]:
    """A key that chooses a part of a data set of the hub, where nothing would read it."""
    path, found = value(f"{block}.path"), value(f"{block}.{key}")
    others_rule = value("data.mixture") is not None if block == "data" else block == "evaluate" and path is None
    if found == default or others_rule:
        return
    where, shown = None if path is None else address(path), f"found {describe(found)}"
    if where is None:
        what = "there is no data.path" if path is None else f"{path} is no data set of the hub"
        yield f"{block}.{key}", f"{shown}, but {what}, so nothing reads it; leave it out"
    elif key == "revision":
        if "://" in path:
            yield f"{block}.{key}", f"{shown}, but {path} is a URL; write hf://datasets/OWNER/NAME@REVISION"
    elif where.is_file:
        yield f"{block}.{key}", f"{shown}, but the path names the files to read, of whatever split; keep one of them"
    elif block != "evaluate" and value(f"{block}.pattern"):
        text = f"{block}.pattern names the files to read, of whatever split; keep one of them"
        yield f"{block}.{key}", f"{shown}, but {text}"


def _no_split(value: Callable[[str], Any]) -> Iterator[Finding]:
    where = value("evaluate.path")
    hub = None if where is None else address(where)
    if hub is not None and not hub.is_file and value("evaluate.split") is None and value("data.pattern") is None:
        yield "evaluate.split", f"missing; name the split of {where} to measure on, for example validation or test"


def _idle_without_split(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    found = value(f"evaluate.{key}")
    if value("evaluate.path") is None and value("evaluate.split") is None and found is not None:
        yield f"evaluate.{key}", f"found {describe(found)}, but only evaluate.split reads it"


def _another_split(value: Callable[[str], Any]) -> Iterator[Finding]:
    """What is evaluated on is another split of the data set that is trained on."""
    split, path = value("evaluate.split"), value("data.path")
    if value("evaluate.path") is not None or split is None:
        return
    if path is None or address(path) is None:
        what = "data.mixture is given" if path is None else f"{path} is no data set of the hub"
        yield "evaluate.split", f"found {describe(split)}, but {what}; name the data to measure on: evaluate.path"
    elif value("data.pattern") or address(path).is_file:
        what = "data.pattern" if value("data.pattern") else "data.path"
        text = f"found {describe(split)}, but {what} names the files that are read, of whatever split; name the data "
        yield "evaluate.split", text + "to measure on: evaluate.path"


def _measured_as_trained(value: Callable[[str], Any]) -> Iterator[Finding]:
    """The evaluation reads rows that are trained on: the same split of the same data set, or one of another revision.

    A data set has several spellings: OWNER/NAME and its URL, no config and "default", no revision and "main".
    """
    split, path = value("evaluate.split"), value("evaluate.path")
    data = {"path": value("data.path"), **{key: value(f"data.{key}") for key in ("pattern", *_HUB_KEYS)}}
    measured = address(path or data["path"] or "")
    if split is None or measured is None or measured.is_file:
        return
    inherited = data if path is None else {}
    config = value("evaluate.config") or inherited.get("config") or "default"
    revision = value("evaluate.revision") or inherited.get("revision") or measured.revision or "main"
    mixture = value("data.mixture")
    sources = {"data": data} if mixture is None else {f"data.mixture.{nth}": each for nth, each in enumerate(mixture)}
    for block, source in sources.items():
        trained = address(source["path"] or "")
        if trained is None or trained.name != measured.name or trained.is_file or source.get("pattern"):
            continue
        other = source.get("revision") or trained.revision or "main"
        is_within = "" in (trained.inside, measured.inside) or trained.inside == measured.inside
        if (source.get("split", "train"), source.get("config") or "default") == (split, config) and is_within:
            yield "evaluate.split", f"found {describe(split)}, which is what is trained on; name another split"
            return
        if other != revision:
            text = f"{revision} is evaluated on, but {block}.revision is {other}, and a split of another revision may "
            yield "evaluate.revision", f"{text}hold rows that are trained on; set it to {other}"
            return


def _within_output_dir(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    """Such data would lie among the files that the run writes."""
    path, output_dir = value(key), value("output_dir")
    if path is None or "://" in path or path.startswith("builtin:") or is_hub_name(path):
        return
    data, output = (Path(each).expanduser().resolve() for each in (path, output_dir))
    if data.is_relative_to(output):
        yield key, f"found {path}, which is in output_dir ({output_dir}), among the run's own files; move one of them"


def pattern(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    found = value(key)
    if found and (".." in Path(found).parts or Path(found).is_absolute()):
        other = f"{key.removesuffix('pattern')}path"
        yield key, f"found {describe(found)}, which leaves the folder; set {other} to the other one"


RULES = (
    *(_path_and_mixture, _mixture_by_length),
    *(partial(_in_place_of_mixture, *each) for each in ({"pattern": None} | _HUB_KEYS).items()),
    *(_idle_buffer, _stream_of_mixture, _stream_by_length, _workers_of_stream, _vocabulary_of_stream),
    *(partial(pattern, "data.pattern"), _no_split, _another_split, _measured_as_trained),
    *(partial(_within_output_dir, key) for key in ("data.path", "evaluate.path")),
    *(partial(_idle_without_split, key) for key in ("config", "revision")),
    *(partial(_part_of_the_hub, "data", *each) for each in _HUB_KEYS.items()),
    *(partial(_part_of_the_hub, "evaluate", key, None) for key in _HUB_KEYS),
)
