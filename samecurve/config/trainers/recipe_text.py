"""The recipe of a translation, as YAML with the origin of each value."""

from __future__ import annotations

import json
from typing import Any

from samecurve.config.trainers.translation import Translation

_PACKED = ("pretrain", "continue_pretrain", "sft", "distill")
_CHAT = ("sft", "distill", "dpo", "reward")
_READ_BY = {"data.train_on": ("sft", "distill", "dpo"), "data.chat": _CHAT, "data.chat_template_kwargs": _CHAT}
_READ_BY |= {"data.streaming": ("pretrain", "continue_pretrain"), "data.messages_column": ("sft", "distill")}


def settle(made: Translation) -> None:
    """Take out values that have no meaning beside others, and add what a task needs."""
    values = made.values
    for key, tasks in _READ_BY.items():
        if values["task"] not in tasks:
            values.pop(key, None)
    if values["task"] not in _PACKED:
        values["data.packing"] = False
    is_held_out = any(values.get(key) for key in ("data.validation_fraction", "evaluate.path", "evaluate.split"))
    if not is_held_out:
        _drop(values, "evaluate.")
    elif not (values.get("evaluate.every_steps") or values.get("evaluate.every_epochs")):
        values["evaluate.every_epochs"] = 1.0
    for room in ("evaluate", "checkpoint"):
        if values.get(f"{room}.every_epochs"):
            values.pop(f"{room}.every_steps", None)
    if values.get("data.streaming"):
        _drop(values, "data.num_workers")
        _drop(values, "data.max_samples")
    _count_steps(made)
    if values.get("adapter.name") is None:
        _drop(values, "adapter.")
    values.setdefault("precision", "fp32")
    values.setdefault("output_dir", "runs/adopted")


def _count_steps(made: Translation) -> None:
    """A mixture draws from each source by its weight, and a stream has no number of rows: neither has epochs."""
    if not ("data.mixture" in made.values or made.values.get("data.streaming")):
        return
    if made.values.pop("epochs", None):
        made.no_equal["epochs"] = "steps; `samecurve inspect` shows the rows of each source"
    for room in ("evaluate", "checkpoint"):
        if made.values.pop(f"{room}.every_epochs", None):
            made.values[f"{room}.every_steps"] = 200


def _drop(values: dict[str, Any], prefix: str) -> None:
    for key in [key for key in values if key.startswith(prefix)]:
        del values[key]


def recipe_text(made: Translation, title: str) -> str:
    """Return the YAML. Settle first."""
    blocks: dict[str, list[str]] = {}
    for key, value in made.values.items():
        block, _, name = key.rpartition(".")
        origins = made.origins.get(key, [])
        comment = f"   # {', '.join(dict.fromkeys(origins))}" if origins else ""
        shown = json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and 0 < abs(value) < 1e-3:
            shown = f"{value:.10g}" if "." in f"{value:.10g}" else f"{value:.1e}"
        blocks.setdefault(block, []).append(f"{'  ' * bool(block)}{name}: {shown}{comment}")
    lines = [f"# {title}", *blocks.pop("", [])]
    for block in sorted(blocks):
        lines += [f"{block}:", *blocks[block]]
    if made.no_equal:
        lines += ["# Without an equal here, so that the training differs:"]
        lines += [f"#   {key}: nearest is {nearest}" for key, nearest in made.no_equal.items()]
    return "\n".join([*lines, ""])
