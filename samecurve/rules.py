"""What more than one key of a recipe takes part in. A rule is skipped when a key that it asks for is itself wrong."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import hub
from .chatml import CHATML
from .config import Adapter
from .documents import describe
from .rules_memory import fp8, kernels, memory
from .rules_optimizer import optimizer
from .rules_profile import profiled
from .rules_sources import mixture, pattern, streaming
from .rules_tasks import chunked, continued, distill, embed, model_folder, preferences, tokenizer
from .sources import BUILTIN, DOCSTRINGS, FUNCTIONS, MODULES, PREFERENCES, pattern_hint

if TYPE_CHECKING:
    from .recipe import Source

Finding = tuple[str, str]
# What not all tasks read, with its default: where another one runs, it would do nothing.
_KEYS_OF_TASKS = {
    ("pretrain", "continue_pretrain", "classify", "mlm"): {"data.text_column": "text"},
    ("pretrain", "continue_pretrain", "sft"): {"data.mixture": None},
    ("pretrain", "continue_pretrain"): {"data.streaming": False},
    ("sft", "distill"): {
        "data.messages_column": None,
        "data.completion_column": None,
        "data.train_on": "assistant",
    },
    ("sft", "distill", "dpo", "reward"): {
        "data.prompt_column": None,
        "data.chat": True,
        "tokenizer.chat_template": None,
    },
    ("classify", "mlm", "embed", "reward"): {"tokenizer.pad_token": None},
    ("dpo", "reward"): {"data.chosen_column": "chosen", "data.rejected_column": "rejected"},
    ("dpo",): {"dpo.loss": "sigmoid", "dpo.beta": 0.1, "dpo.label_smoothing": 0.0, "dpo.gamma": None},
    ("reward",): {"reward.center_rewards_coefficient": None},
    ("distill",): {
        "distill.teacher": None,
        "distill.temperature": 1.0,
        "distill.divergence": "forward_kl",
        "distill.label_weight": 0.0,
    },
    ("classify",): {"data.text_pair_column": None, "data.label_column": "label", "data.labels": None},
    ("embed",): {
        "data.anchor_column": "anchor",
        "data.positive_column": "positive",
        "data.negative_columns": None,
        "embed.temperature": 0.05,
        "embed.pooling": "mean",
    },
}
_BUILTINS = {
    "pretrain": BUILTIN,
    "continue_pretrain": BUILTIN,
    "sft": FUNCTIONS,
    "distill": FUNCTIONS,
    "dpo": PREFERENCES,
    "reward": PREFERENCES,
    "classify": MODULES,
    "mlm": BUILTIN,
    "embed": DOCSTRINGS,
}
_PACKED = ("pretrain", "continue_pretrain", "sft", "distill")


def apply(source: Source) -> None:
    """Add what the rules find to the source's problems."""
    model = (_model, _adapter, _attention, _positions, memory, fp8, kernels)
    data = (tokenizer, _data, _task, embed, distill, chunked, _columns, preferences, continued)
    for rule in (*model, *data, optimizer, _schedule, _checkpoint, _guard, _evaluate, profiled):
        with contextlib.suppress(KeyError):
            for key, text in rule(source.value):
                source.document.problem(tuple(key.split(".")), text)


def columns_of(task: str) -> list[str]:
    """The keys by which a recipe of the task names columns."""
    readers = ((key, tasks) for tasks, keys in _KEYS_OF_TASKS.items() for key in keys)
    return [key for key, tasks in readers if task in tasks and key.endswith(("_column", "_columns"))]


def _model(value: Callable[[str], Any]) -> Iterator[Finding]:
    path, config = value("model.path"), value("model.config")
    if path is not None and config is not None:
        yield "model", "both path and config are given, but a model has one origin; set one of them to null"
    elif path is None and config is None:
        yield "model", "neither path (pretrained) nor config (from scratch) is given; add one"
    elif config is not None and "model_type" not in config:
        yield "model.config", "model_type is missing; add it, for example model_type: llama"
    elif config is not None and not isinstance(config["model_type"], str):
        yield "model.config.model_type", f"found {describe(config['model_type'])}, text is needed, for example llama"
    elif path is not None and path.startswith((".", "/", "~")):
        yield from model_folder("model.path", Path(path))


def _adapter(value: Callable[[str], Any]) -> Iterator[Finding]:
    if value("adapter.quantization") is not None:
        if value("adapter.dora"):
            yield "adapter.dora", "found true, which needs the norms of weights that are not quantized; use false"
        if importlib.util.find_spec("bitsandbytes") is None:
            text = "found 4bit, which needs the package bitsandbytes: pip install bitsandbytes, or use null"
            yield "adapter.quantization", text
    if value("adapter.name") is None:
        for key, field in Adapter.model_fields.items():
            found = value(f"adapter.{key}")
            if key != "name" and found != field.default:
                text = f"found {describe(found)}, but adapter.name is null, so there is no adapter; set it to lora"
                yield f"adapter.{key}", text
    elif value("model.config") is not None:
        text = f"found {value('adapter.name')}, which adapts a pretrained model, but model.config makes a new one; "
        yield "adapter.name", text + "give model.path, or set adapter.name to null"


def _positions(value: Callable[[str], Any]) -> Iterator[Finding]:
    length, fields = value("batch.sequence_length"), _architecture(value)
    for key in ("max_position_embeddings", "n_positions"):
        limit = fields.get(key)
        if isinstance(limit, int) and limit < length:
            owner = "model.config" if value("model.path") is None else "the model's config.json"
            yield "batch.sequence_length", f"found {length}, but {key} in {owner} is {limit}; a row has to fit into it"


def _attention(value: Callable[[str], Any]) -> Iterator[Finding]:
    """flash-attn tells packed documents apart by their positions only in a batch of one row, and knows no fp32."""
    if value("model.attention") != "flash_attention_2":
        return
    if value("data.packing") and value("batch.micro_batch_size") > 1:
        text = (
            f"found flash_attention_2, which does not keep packed documents apart when batch.micro_batch_size is "
            f"{value('batch.micro_batch_size')}; set that to 1, or use sdpa, or data.packing: false"
        )
        yield "model.attention", text
    if value("precision") == "fp32":
        yield "model.attention", "found flash_attention_2, which does not compute in fp32; use sdpa, or precision: bf16"


def _data(value: Callable[[str], Any]) -> Iterator[Finding]:
    builtin = _BUILTINS[value("task")]

    def unreadable(key: str, path: str | None) -> Iterator[Finding]:
        remote = path is not None and "://" in path
        if remote and (key != "data.path" or not value("data.streaming")):
            yield key, f"found {path}, but only data.path with data.streaming: true is read from a URL"
        elif remote:
            return
        elif path in _BUILTINS.values() and path != builtin:
            yield key, f"found {path}, which task {value('task')} cannot read; {builtin} is the one that it can"
        elif path is not None and not value("data.streaming") and hub.is_name(path):
            return  # downloaded when the data are read
        elif path is not None and path != builtin and not Path(path).exists():
            owner = "data.pattern" if key in ("data.path", "evaluate.path") else key.replace("path", "pattern")
            yield key, f"no such file or folder: {Path(path).absolute()}{pattern_hint(path, owner)}"

    if value("data.path") is None and value("data.mixture") is None:
        yield "data.path", f"missing; name a file, a folder or {builtin}, here or as data.path=... when starting"
    for key in ("data.path", "evaluate.path"):
        yield from unreadable(key, value(key))
    yield from mixture(value, unreadable)
    yield from streaming(value)
    yield from pattern("data.pattern", value("data.pattern"))
    if value("data.group_by_length") and value("data.packing"):
        yield "data.group_by_length", "found true, but packed rows are full already; set data.packing to false"


def _task(value: Callable[[str], Any]) -> Iterator[Finding]:
    task = value("task")
    for tasks, keys in _KEYS_OF_TASKS.items():
        readers = f"task {tasks[0]} reads" if len(tasks) == 1 else f"the tasks {', '.join(tasks)} read"
        for key, default in keys.items():
            if task not in tasks and value(key) != default:
                yield key, f"found {describe(value(key))}, but only {readers} it and task is {task}"
    if task not in _PACKED and value("data.packing"):
        what = "two answers to one prompt" if task in ("dpo", "reward") else "one text"
        what = "texts that are read by themselves" if task == "embed" else what
        yield "data.packing", f"found true, but a row of task {task} holds {what}; set it to false"


def _columns(value: Callable[[str], Any]) -> Iterator[Finding]:
    labels = value("data.labels") or ()
    twice = next((name for name in labels if labels.count(name) > 1), None)
    if twice is not None:
        yield "data.labels", f"{twice} is there twice; each name is one class"
    if labels and value("data.path") == MODULES:
        yield "data.labels", f"given, but the classes of {MODULES} are known; leave it out"
    others = [key for key in ("data.prompt_column", "data.completion_column") if value(key) is not None]
    if value("data.messages_column") is not None and others:
        yield "data.messages_column", f"given together with {others[0]}; a row is one or the other, keep one of them"
    if value("data.messages_column") is not None and not value("data.chat"):
        yield "data.chat", "found false, but messages need a template; set it to true, or name prompt_column instead"
    template = value("tokenizer.chat_template")
    if template not in (None, CHATML) and not Path(template).is_file():
        yield "tokenizer.chat_template", f"no such file: {Path(template).absolute()}; {CHATML} needs none"


def _schedule(value: Callable[[str], Any]) -> Iterator[Finding]:
    steps, warmup = value("steps"), value("schedule.warmup_steps")
    if warmup >= steps:
        yield "schedule.warmup_steps", f"found {warmup}, but steps is {steps}; warm-up has to end before the run does"
    name, decay = value("schedule.name"), value("schedule.decay_steps")
    if name != "wsd" and decay is not None:
        yield "schedule.decay_steps", f"found {decay}, but only wsd has a decay of its own and schedule.name is {name}"
    elif name == "wsd" and decay is None:
        yield "schedule.decay_steps", "missing; wsd needs the length of its final decay"
    elif name == "wsd" and warmup < steps < warmup + decay:
        yield "schedule.decay_steps", f"found {decay}; with {warmup} warm-up steps that is more than the {steps} steps"


def _checkpoint(value: Callable[[str], Any]) -> Iterator[Finding]:
    every, best, evaluated = map(value, ("checkpoint.every_steps", "checkpoint.best", "evaluate.every_steps"))
    if best and every and (not evaluated or every % evaluated):
        text = (
            f"found {best}, but checkpoints are written every {every} steps and evaluate.every_steps is {evaluated}; "
            "set that to a divisor of checkpoint.every_steps, so that each has a number of its own"
        )
        yield "checkpoint.best", text


def _guard(value: Callable[[str], Any]) -> Iterator[Finding]:
    ratio = value("guard.rollback_ratio")
    if ratio is not None and not value("checkpoint.every_steps"):
        text = f"found {ratio:g}, but checkpoint.every_steps is 0, so there is nothing to go back to; set it above 0"
        yield "guard.rollback_ratio", text


def _evaluate(value: Callable[[str], Any]) -> Iterator[Finding]:
    every, held_out = value("evaluate.every_steps"), value("data.held_out_fraction")
    if every and not held_out and value("evaluate.path") is None:
        text = f"found {every}, but nothing is held out; set data.held_out_fraction above 0 or evaluate.path"
        yield "evaluate.every_steps", text


def _architecture(value: Callable[[str], Any]) -> dict[str, Any]:
    """The fields of the model's config that the recipe or a local model folder gives."""
    with contextlib.suppress(OSError, ValueError):
        config, path = value("model.config"), value("model.path")
        if config is None and path is not None:
            config = json.loads((Path(path) / "config.json").read_text())
        return config if isinstance(config, dict) else {}
    return {}


def hidden_layers(source: Source) -> int | None:
    """How many decoder layers the model has, where that is known without loading it."""
    with contextlib.suppress(KeyError):
        fields = _architecture(source.value)
        found = [fields[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in fields]
        return found[0] if found and isinstance(found[0], int) else None
    return None


def model_type(source: Source) -> str | None:
    """The model's family in transformers, where that is known without loading it."""
    with contextlib.suppress(KeyError):
        found = _architecture(source.value).get("model_type")
        return found if isinstance(found, str) else None
    return None
