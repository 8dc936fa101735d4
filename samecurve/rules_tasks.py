"""What more than one key of a recipe takes part in, of single tasks, and of the tokenizer."""

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


def preferences(value: Callable[[str], Any]) -> Iterator[Finding]:
    loss, gamma = value("dpo.loss"), value("dpo.gamma")
    if loss == "simpo" and gamma is None:
        yield (
            "dpo.gamma",
            "missing; simpo needs its margin (its authors: beta 2 to 2.5, and gamma 0.1 to 0.8 times that)",
        )
    elif loss != "simpo" and gamma is not None:
        yield "dpo.gamma", f"found {gamma:g}, but only simpo has a margin and dpo.loss is {loss}; set it to null"
    smoothing = value("dpo.label_smoothing")
    if loss != "sigmoid" and smoothing:
        text = f"found {smoothing:g}, but only sigmoid smooths labels and dpo.loss is {loss}; set it to 0"
        yield "dpo.label_smoothing", text
    if value("data.chosen_column") == value("data.rejected_column"):
        yield "data.rejected_column", f"found {value('data.rejected_column')}, which is data.chosen_column; name both"


def chunked(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("loss.implementation")
    if kind not in ("chunked", "liger"):
        return
    text = f"found {kind}, but "
    if value("task") not in _BY_TOKEN:
        text += f"the loss of task {value('task')} is not a sum over tokens ({', '.join(_BY_TOKEN)} have one)"
    elif kind == "liger" and value("task") == "distill":
        text += "it computes cross-entropy with labels, and task distill learns from a teacher's logits, too"
    elif value("precision") == "fp16":
        text += "it takes gradients before the loss is scaled, and in fp16 many of them are 0 then"
    else:
        return
    yield "loss.implementation", f"{text}; use auto"


def tokenizer(value: Callable[[str], Any]) -> Iterator[Finding]:
    path, size = value("tokenizer.path"), value("tokenizer.vocabulary_size")
    if path is not None and size is not None:
        yield "tokenizer", "both path and vocabulary_size (train one) are given; keep one"
    elif size is not None and value("model.path") is not None and value("model.config") is None:
        text = f"found {size}, but a new tokenizer would give other tokens to the embeddings of model.path; "
        yield "tokenizer.vocabulary_size", text + "set it to null, which takes the tokenizer of model.path"
    elif path is None and size is None and value("model.path") is None:
        yield "tokenizer", "a model from scratch brings no tokenizer; add tokenizer.path or tokenizer.vocabulary_size"


def continued(value: Callable[[str], Any]) -> Iterator[Finding]:
    """Weights that know something already: their tokens keep their meaning, and the first steps do not shake them."""
    if value("task") != "continue_pretrain":
        return
    if value("model.path") is None:
        yield "model.path", "missing; continue_pretrain goes on from a pretrained model: name a folder or a hub name"
    if value("schedule.warmup_steps") == 0:
        text = "found 0, but Adam's moments start at 0 again, so the first full steps would be about as long as its "
        yield "schedule.warmup_steps", text + "largest; set it above 0"


def model_folder(key: str, folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield key, f"no such folder: {folder.absolute()}"
    elif not (folder / "config.json").is_file():
        yield key, f"{folder.absolute()} holds no config.json; {_instead(folder)}"


def _instead(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        run = folder.parent if (folder.parent / "run.json").is_file() else folder
        return f"it is an adapter: python -m samecurve merge {run} makes one model of the two; name {run / 'merged'}"
    if (folder / "model").is_dir():
        return f"a Hugging Face model folder is needed: name {folder / 'model'}"
    return "a Hugging Face model folder is needed"
