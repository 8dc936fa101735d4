"""Rules for `data.mixture`, `data.streaming` and Hub data sets, checked before any file is opened."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from samecurve.config.documents import Finding, describe
from samecurve.config.schema import Data
from samecurve.config.source import InvalidValue
from samecurve.specs.data_names import address, is_hub_name
from samecurve.specs.row_formats import FORMATS, named
from samecurve.specs.tasks import readers

_HUB_KEYS = {"split": "train", "config": None, "revision": None}
# by the key beside which rows cannot be sorted by their lengths: why, and what to set
_UNSORTED = {
    "data.mixture": "the sources of data.mixture cannot be sorted by length together; set it to false",
    "data.packing": "packed rows have equal lengths; set it or data.packing to false",
    "data.streaming": "sorting by length needs the lengths of all rows, which data.streaming does not know; set it to "
    "false",
}
# by key: the only value that works in a stream, why, and what to set
_STREAMED = {
    "data.bad_rows": (
        "stop",
        "reads rows during training, so their number cannot be told before it; set it to stop, or data.streaming to "
        "false",
    ),
    "data.num_workers": (
        0,
        "prepares rows in the background already, and each worker would tokenise the whole stream; set it to 0",
    ),
    "tokenizer.vocabulary_size": (
        None,
        "reads no data before training, so no tokenizer can be trained; set it to null, and tokenizer.path to a "
        "tokenizer",
    ),
}
_COLUMNS = ("text_column", "messages_column", "prompt_column", "completion_column", "format")


def in_mixture(index: int) -> tuple[Callable[[Callable[[str], Any]], Iterator[Finding]], ...]:
    """The rules of one source of data.mixture, except whether its path exists."""
    key = f"data.mixture.{index}"
    columns = (partial(_column, index, column) for column in _COLUMNS)
    parts = (partial(_part_of_the_hub, key, part, default) for part, default in _HUB_KEYS.items())
    return (
        *(partial(pattern, f"{key}.pattern"), partial(_again, index), partial(_within_output_dir, f"{key}.path")),
        *(partial(_number_of_rows, key), *columns, *parts),
    )


def _again(index: int, value: Callable[[str], Any]) -> Iterator[Finding]:
    def identity(nth: int) -> tuple:
        source = f"data.mixture.{nth}"
        parts = (value(f"{source}.{key}") for key in _HUB_KEYS)
        return str(Path(value(f"{source}.path")).absolute()), value(f"{source}.pattern"), *parts

    for first in range(index):
        with contextlib.suppress(InvalidValue):  # an invalid source hides only its own pairs
            if identity(first) == identity(index):
                text = f"found {value(f'data.mixture.{index}.path')}, which data.mixture.{first} already reads"
                yield f"data.mixture.{index}.path", f"{text}; add this weight to that source, and remove this one"
                return


def _column(index: int, column: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    key, task = f"data.mixture.{index}.{column}", value("task")
    mixed, tasks = readers("data.mixture"), readers(f"data.{column}")
    if value(key) is not None and task in mixed and task not in tasks:
        users = [name for name in mixed if name in tasks]
        which = f"task {users[0]} uses" if len(users) == 1 else f"the tasks {', '.join(users)} use"
        yield key, f"found {describe(value(key))}, but only {which} this key and task is {task}; remove it"


def _path_and_mixture(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.mixture") is not None and value("data.path") is not None:
        yield "data.mixture", f"conflicts with data.path ({value('data.path')}); set one of them to null"


def _source(value: Callable[[str], Any]) -> Iterator[Finding]:
    """data.source beside what also says where the rows are, or its options without it."""
    source = value("data.source")
    if source is None and value("data.source_options"):
        yield "data.source_options", "found a block of keys, but data.source is not given; set it, or remove this"
    for key in ("path", "mixture", "streaming", "pattern"):
        if source is not None and value(f"data.{key}"):
            text = f"found {source}, which returns all rows, but data.{key} is given; remove one of the two"
            yield "data.source", text


def _by_length(other: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.group_by_length") and value(other):
        yield "data.group_by_length", f"found true, but {_UNSORTED[other]}"


def _in_place_of_mixture(key: str, default: str | None, value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("data.mixture") is not None and value(f"data.{key}") != default:
        text = f"found {describe(value(f'data.{key}'))}, but data.mixture is given; move it to the source that needs it"
        yield f"data.{key}", f"{text}, for example data.mixture.0.{key}"


def _format(value: Callable[[str], Any]) -> Iterator[Finding]:
    """data.format is another task's, or the recipe also names columns."""
    name = value("data.format")
    if name is None:
        return
    task, tasks = value("task"), named(name).tasks.split(", ")
    if task in readers("data.format") and task not in tasks:
        own = [known.name for known in FORMATS if task in known.tasks.split(", ")]
        text = f"found {name}, a format of the task{'s' * (len(tasks) > 1)} {' and '.join(tasks)}, but task is {task}"
        yield "data.format", f"{text}; use one of {', '.join(own)}"
    for column in ("messages", "prompt", "completion", "chosen", "rejected", "anchor", "positive"):
        key = f"data.{column}_column"
        if value(key) != Data.model_fields[f"{column}_column"].default:
            text = f"found {value(key)}, but data.format={name} reads columns of its own; remove one of the two"
            yield key, text


def _number_of_rows(block: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    """max_samples where rows are not read from a file's beginning. `block`: data or a source of its mixture."""
    number, path = value(f"{block}.max_samples"), value(f"{block}.path") or ""
    if number is not None and value("data.streaming"):
        yield f"{block}.max_samples", f"found {number}, but data.streaming reads files in pieces; remove one of the two"
    elif number is not None and path.startswith("builtin:"):
        text = f"found {number}, but {path} is read whole; set {block}.path to a file, or remove this"
        yield f"{block}.max_samples", text


def _idle_buffer(value: Callable[[str], Any]) -> Iterator[Finding]:
    size = value("data.shuffle_buffer_mib")
    if not value("data.streaming") and size != Data.model_fields["shuffle_buffer_mib"].default:
        text = f"found {size:g}, but data.streaming is false and all rows are shuffled without a buffer; remove it"
        yield "data.shuffle_buffer_mib", text


def _streamed(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    usable, why = _STREAMED[key]
    if value("data.streaming") and value(key) != usable:
        yield key, f"found {value(key)}, but data.streaming {why}"


def _part_of_the_hub(block: str, key: str, default: str | None, value: Callable[[str], Any]) -> Iterator[Finding]:
    """A key that selects part of a Hub data set has no effect."""
    path, given = value(f"{block}.path"), value(f"{block}.{key}")
    # what _in_place_of_mixture, _idle_without_split or _split reports
    others_rule = value("data.mixture") is not None if block == "data" else block == "evaluate" and path is None
    if given == default or others_rule:
        return
    where, shown = None if path is None else address(path), f"found {describe(given)}"
    if path is None or where is None:
        why = "data.path is not given" if path is None else f"{path} is not a data set of the Hub"
        yield f"{block}.{key}", f"{shown}, but {why}; remove it"
    elif key == "revision":
        if "://" in path:
            text = f"{shown}, but {path} is a URL; put the revision into it: hf://datasets/OWNER/NAME@REVISION"
            yield f"{block}.{key}", text
    elif where.is_file:
        yield f"{block}.{key}", f"{shown}, but the path names files, whatever their split; keep one of the two"
    elif block != "evaluate" and value(f"{block}.pattern"):
        text = f"{block}.pattern selects files, whatever their split; keep one of the two"
        yield f"{block}.{key}", f"{shown}, but {text}"


def _idle_without_split(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    given = value(f"evaluate.{key}")
    if value("evaluate.path") is None and value("evaluate.split") is None and given is not None:
        yield f"evaluate.{key}", f"found {describe(given)}, but evaluate.split is not given; set that, or remove this"


def _split(value: Callable[[str], Any]) -> Iterator[Finding]:
    """A Hub data set in evaluate.path needs a split. Without that path the split is of the training data."""
    split, measured = value("evaluate.split"), value("evaluate.path")
    where = None if measured is None else address(measured)
    if where is not None and not where.is_file and split is None and value("data.pattern") is None:
        yield "evaluate.split", f"missing; name the split of {measured} to evaluate on, for example validation or test"
    if measured is not None or split is None:
        return
    path = value("data.path")
    where = None if path is None else address(path)
    if where is None:
        why = "data.mixture is given" if path is None else f"{path} is not a data set of the Hub"
        yield "evaluate.split", f"found {describe(split)}, but {why}; set evaluate.path to the evaluation data"
    elif value("data.pattern") or where.is_file:
        owner = "data.pattern" if value("data.pattern") else "data.path"
        text = f"found {describe(split)}, but {owner} selects files, whatever their split; set evaluate.path to the "
        yield "evaluate.split", text + "evaluation data"


def _measured_as_trained(value: Callable[[str], Any]) -> Iterator[Finding]:
    """Evaluation reads training rows: the same split of the same data set, or a split of another revision.

    A data set has several spellings: OWNER/NAME and its URL, no config and "default", no revision and "main".
    """
    split, path = value("evaluate.split"), value("evaluate.path")
    measured = address(path or value("data.path") or "")
    if split is None or measured is None or measured.is_file:
        return
    inherited = {key: value(f"data.{key}") for key in _HUB_KEYS} if path is None else {}
    config = value("evaluate.config") or inherited.get("config") or "default"
    revision = value("evaluate.revision") or inherited.get("revision") or measured.revision or "main"
    for block, source in _trained(value).items():
        trained = address(source["path"] or "")
        if trained is None or trained.name != measured.name or trained.is_file or source.get("pattern"):
            continue
        other = source.get("revision") or trained.revision or "main"
        # "" is the whole data set, which contains every folder
        is_within = "" in (trained.inside, measured.inside) or trained.inside == measured.inside
        if (source.get("split", "train"), source.get("config") or "default") == (split, config) and is_within:
            yield "evaluate.split", f"found {describe(split)}, which is the training split; use another split"
            return
        if other != revision:
            text = f"evaluation reads revision {revision}, but {block}.revision is {other}, and splits of different "
            yield "evaluate.revision", f"{text}revisions may share rows; set it to {other}"
            return


def _trained(value: Callable[[str], Any]) -> dict[str, dict[str, Any]]:
    """Return path, pattern and part of the Hub of all training data by the key of their block."""
    mixture = value("data.mixture")
    if mixture is not None:
        return {f"data.mixture.{nth}": part for nth, part in enumerate(mixture)}
    return {"data": {key: value(f"data.{key}") for key in ("path", "pattern", *_HUB_KEYS)}}


def _measured_file(value: Callable[[str], Any]) -> Iterator[Finding]:
    """Evaluation reads a file that is trained on, too."""
    path = value("evaluate.path")
    if path is None or not os.path.exists(path) or any(_within_output_dir("evaluate.path", value)):
        return
    measured = Path(os.path.realpath(path))
    for block, source in _trained(value).items():
        trained = Path(os.path.realpath(source["path"] or os.devnull))
        is_nested = measured.is_relative_to(trained) or trained.is_relative_to(measured)
        if is_nested and _files(trained, source.get("pattern")) & _files(measured, value("data.pattern")):
            others = f"select the other files with {block}.pattern, or move it out of the folder"
            fix = others if trained.is_dir() else "name another file"
            text = f"found {path}, which is trained on, too, by {block}.path ({source['path']}); {fix}, or set "
            yield "evaluate.path", f"{text}data.validation_fraction in place of it"


def _files(path: Path, glob: str | None) -> set[str]:
    """Return the real paths of a file, or of a folder's files that match and are not hidden."""
    files: Iterable[Path] = ()
    with contextlib.suppress(ValueError, NotImplementedError):  # no pattern, which _listed of data/selection.py reports
        files = list(path.glob(glob or "**/*")) if path.is_dir() else [path]
    hidden = (any(part.startswith(".") for part in file.relative_to(path).parts) for file in files)
    return {os.path.realpath(file) for file, skip in zip(files, hidden, strict=True) if not skip and file.is_file()}


def _within_output_dir(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    """Data inside output_dir would be mixed with the files that the run writes."""
    path, output_dir = value(key), value("output_dir")
    if path is None or "://" in path or path.startswith("builtin:") or is_hub_name(path):
        return
    # unlike Path.resolve, realpath leaves a link that leads back to itself for another rule to report
    data, output = (Path(os.path.realpath(Path(name).expanduser())) for name in (path, output_dir))
    if data.is_relative_to(output):
        yield key, f"found {path}, which is inside output_dir ({output_dir}), where the run writes; move one of them"


def pattern(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    glob = value(key)
    if glob and (".." in Path(glob).parts or Path(glob).is_absolute()):
        other = f"{key.removesuffix('pattern')}path"
        yield key, f"found {describe(glob)}, which leaves {other}; set {other} to the folder of the files"


RULES = (
    *(_path_and_mixture, _source, *(partial(_by_length, other) for other in _UNSORTED)),
    *(partial(_in_place_of_mixture, *pair) for pair in ({"pattern": None, "max_samples": None} | _HUB_KEYS).items()),
    *(_format, partial(_number_of_rows, "data"), _idle_buffer, *(partial(_streamed, key) for key in _STREAMED)),
    *(partial(pattern, "data.pattern"), _split, _measured_as_trained, _measured_file),
    *(partial(_within_output_dir, key) for key in ("data.path", "evaluate.path")),
    *(partial(_idle_without_split, key) for key in ("config", "revision")),
    *(partial(_part_of_the_hub, "data", *pair) for pair in _HUB_KEYS.items()),
    *(partial(_part_of_the_hub, "evaluate", key, None) for key in _HUB_KEYS),
)
