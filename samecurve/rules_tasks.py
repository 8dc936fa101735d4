"""What more than one key of a recipe takes part in, of single tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Finding = tuple[str, str]
_BY_TOKEN = ("pretrain", "continue_pretrain", "sft", "distill", "mlm")


def embed(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("task") == "embed" and value("batch.global_batch_size") < 2:
        yield (
            "batch.global_batch_size",
            "found 1, but embed learns from what tells rows apart; set it to 2 or more",
        )
    columns = [value("data.anchor_column"), value("data.positive_column"), *(value("data.negative_columns") or ())]
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        yield "data.negative_columns" if columns[0] != columns[1] else "data.positive_column", f"{twice} is read twice"


def distill(value: Callable[[str], Any]) -> Iterator[Finding]:
    teacher = value("distill.teacher")
    if value("task") == "distill" and teacher is None:
        yield "distill.teacher", "missing; name the folder or hub name of the model to learn from"
    elif teacher is not None and teacher.startswith((".", "/", "~")):
        yield from model_folder("distill.teacher", Path(teacher))


def chunked(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("loss.implementation") != "chunked":
        return
    text = "found chunked, but "
    if value("task") not in _BY_TOKEN:
        text += f"the loss of task {value('task')} is not a sum over tokens ({', '.join(_BY_TOKEN)} have one)"
    elif value("precision") == "fp16":
        text += "it takes gradients before the loss is scaled, and in fp16 many of them are 0 then"
    else:
        return
    yield "loss.implementation", f"{text}; use auto"


def model_folder(key: str, folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield key, f"no such folder: {folder.absolute()}"
    elif not (folder / "config.json").is_file():
        yield key, f"{folder.absolute()} holds no config.json; a Hugging Face model folder is needed"
