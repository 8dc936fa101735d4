"""Rules for single tasks, their losses, the tokenizer and the folders of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from samecurve.config.documents import Finding, describe
from samecurve.specs.data_names import is_import_path
from samecurve.specs.tasks import TASKS
from samecurve.storage.checksums import folder_problem
from samecurve.storage.records import read_record

_CHUNKED = ("chunked", "liger")


def _refused(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    """A value that the task cannot use, see TaskSpec.refuses."""
    task = value("task")
    if key not in TASKS[task].refuses:
        return
    refused, reason = TASKS[task].refuses[key]
    if value(key) == refused:
        observed = "missing;" if refused is None else f"found {describe(refused)}, but"
        yield key, f"{observed} task {task} {reason}"


def _task_options(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("task_options") and not is_import_path(value("task")):
        text = f"found {', '.join(value('task_options'))}, but only a task that is named by its import path has options"
        yield "task_options", f"{text} and task is {value('task')}; remove them"


def _same_column(other: str, key: str, fix: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    if value(other) == value(key):
        yield key, f"found {value(key)}, which {other} also names; use {fix}"


def _negatives(value: Callable[[str], Any]) -> Iterator[Finding]:
    columns = value("data.negative_columns") or ()
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        yield "data.negative_columns", f"{twice} is listed twice; remove one"


def _negative_too(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    if value(key) in (value("data.negative_columns") or ()):
        yield "data.negative_columns", f"found {value(key)}, which {key} also names; remove it"


def _folder(key: str, value: Callable[[str], Any]) -> Iterator[Finding]:
    path = value(key)
    # a path of another form without such a folder may be a name of the hub, which only loading the model tells
    if path is not None and (path.startswith((".", "/", "~")) or Path(path).is_dir()):
        yield from model_folder(key, Path(path))


def _margin(value: Callable[[str], Any]) -> Iterator[Finding]:
    loss, gamma = value("dpo.loss"), value("dpo.gamma")
    if loss == "simpo" and gamma is None:
        text = "missing; simpo needs a margin (its authors use beta 2 to 2.5, and gamma 0.1 to 0.8 times beta)"
        yield "dpo.gamma", text
    elif loss != "simpo" and gamma is not None:
        yield "dpo.gamma", f"found {gamma:g}, but only simpo uses a margin and dpo.loss is {loss}; set it to null"


def _smoothing(value: Callable[[str], Any]) -> Iterator[Finding]:
    loss, smoothing = value("dpo.loss"), value("dpo.label_smoothing")
    if loss != "sigmoid" and smoothing:
        text = f"found {smoothing:g}, but only sigmoid smooths labels and dpo.loss is {loss}; set it to 0"
        yield "dpo.label_smoothing", text


def _weights(value: Callable[[str], Any]) -> Iterator[Finding]:
    for key in ("dpo.desirable_weight", "dpo.undesirable_weight"):
        if value("dpo.loss") != "kto" and value(key) != 1:
            text = f"found {value(key):g}, but only kto weighs answers and dpo.loss is {value('dpo.loss')}; set it to 1"
            yield key, text


def _not_by_token(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind, task = value("loss.implementation"), value("task")
    takes = TASKS[task].by_token if kind == "liger" else TASKS[task].takes_chunks
    if kind in _CHUNKED and not takes:
        others = ", ".join(name for name, spec in TASKS.items() if spec.by_token)
        text = f"found {kind}, but the loss of task {task} is not a sum over tokens, as those of {others} are"
        yield "loss.implementation", f"{text}; use auto"


def _unscaled(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("loss.implementation")
    if kind in _CHUNKED and value("precision") == "fp16":
        text = f"found {kind}, which computes gradients before the loss is scaled, so that many round to 0 in fp16"
        yield "loss.implementation", f"{text}; use auto"


def _one_tokenizer(value: Callable[[str], Any]) -> Iterator[Finding]:
    path, size = value("tokenizer.path"), value("tokenizer.vocabulary_size")
    if path is not None and size is not None:
        yield "tokenizer", "both path (an existing tokenizer) and vocabulary_size (train one) are given; keep one"
    elif path is size is None and value("model.config"):
        yield "tokenizer", "a model from scratch has no tokenizer; add tokenizer.path or tokenizer.vocabulary_size"


def _own_tokenizer(value: Callable[[str], Any]) -> Iterator[Finding]:
    size = value("tokenizer.vocabulary_size")
    if size is not None and value("model.path") is not None and value("model.config") is None:
        text = f"found {size}, but the embeddings of model.path belong to its own tokenizer, not to a new one; "
        yield "tokenizer.vocabulary_size", text + "set it to null to use the tokenizer of model.path"


_NEGATIVE_TOO = (partial(_negative_too, f"data.{role}_column") for role in ("anchor", "positive"))
RULES = (
    *(_one_tokenizer, _own_tokenizer),
    *(partial(_refused, key) for key in dict.fromkeys(key for spec in TASKS.values() for key in spec.refuses)),
    partial(_same_column, "data.anchor_column", "data.positive_column", "another column"),
    partial(_same_column, "data.chosen_column", "data.rejected_column", "different columns"),
    *(_task_options, _negatives, *_NEGATIVE_TOO),
    *(partial(_folder, key) for key in ("model.path", "distill.teacher")),
    *(_not_by_token, _unscaled),
    *(_margin, _smoothing, _weights),
)


def model_folder(key: str, folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield key, f"no such folder: {folder.absolute()}"
    elif not (folder / "config.json").is_file():
        yield key, f"{folder.absolute()} has no config.json; {_instead(key, folder)}"
    elif problem := folder_problem(folder):
        yield key, problem


def _instead(key: str, folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        run = folder.parent if folder.name == "model" and (folder.parent / "run.json").is_file() else folder
        config = read_record(folder / "adapter_config.json").value or {}
        base = config.get("base_model_name_or_path", "its base model")
        merged = f"merge it first, python -m samecurve merge {run}, and use {run / 'merged'}"
        goes_on = f"set model.path to {folder} to train it further, or " if key == "model.path" else ""
        return f"this is an adapter of {base}; {goes_on}{merged}"
    if (folder / "model" / "adapter_config.json").is_file():
        return _instead(key, folder / "model")
    if (folder / "model").is_dir():
        return f"use the Hugging Face model folder {folder / 'model'}"
    return "give a Hugging Face model folder"
