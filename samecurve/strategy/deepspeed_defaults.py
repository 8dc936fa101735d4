"""A DeepSpeed JSON's optimizer, scheduler and batch: what DeepSpeed takes for values that they leave out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samecurve.config.documents import Document
from samecurve.strategy.accelerate_keys import ACCUMULATION
from samecurve.strategy.deepspeed_keys import DEEPSPEED
from samecurve.strategy.plan import Statement

# of DeepSpeed's optimizers; the recipe's own are others
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer.betas": (0.9, 0.999), "optimizer.epsilon": 1e-8, "optimizer.weight_decay": 0.0},
    "lion": {"optimizer.betas": (0.9, 0.99), "optimizer.weight_decay": 0.0},
    "sgd": {"optimizer.weight_decay": 0.0},  # torch's
}
_OPTIMIZERS["adamw"] = _OPTIMIZERS["adam"]
_MICRO = "train_micro_batch_size_per_gpu"
_WARMUP = 1000  # steps, in each scheduler of runtime/lr_schedules.py


def read_defaults(document: Document, notes: list[str]) -> Iterator[Statement]:
    """Yield what DeepSpeed takes for values that the blocks leave out; a value that the recipe gives counts before it.

    A block of which everything is "auto" is the recipe's, and loses its type. `notes` gets lines for the user.
    """
    micro, others = document.get(_MICRO), {"train_batch_size", "gradient_accumulation_steps"}
    if type(micro) is int and not others & document.content.keys():  # DeepSpeed takes one step of accumulation
        yield Statement(ACCUMULATION, (1,), document, (_MICRO,), micro, weak=True)
    for name, harmless in (("optimizer", ()), ("scheduler", (0, -1))):
        block = document.get(name)
        params = block.get("params") if isinstance(block, dict) else None
        if not isinstance(block, dict) or not isinstance(params, (dict, type(None))):
            continue
        params, kind = params or {}, DEEPSPEED[name]["type"]
        known, open_values = DEEPSPEED[name]["params"], ("auto", None, *harmless)
        numbers = [value for key, value in params.items() if key in known and value not in open_values]
        if "type" in block and kind.refusal(block["type"]):
            block.pop("params", None)  # of an algorithm that the problem of its name refuses
        elif name == "scheduler" and not numbers:
            text = f"scheduler {block.get('type')} of {document.place(('scheduler',))} leaves its values open"
            notes.append(f"{text}, so the recipe's schedule counts")
            block.clear()
        elif name == "scheduler":
            yield from _schedule(document, block.get("type"), params)
        elif numbers:
            yield from _optimizer(document, str(block.get("type")), params, notes)
        elif "type" in block:
            yield Statement(kind.by, kind.values(block["type"]), document, (name, "type"), block["type"], weak=True)
            del block["type"]


def _schedule(document: Document, algorithm: str | None, params: dict) -> Iterator[Statement]:
    path = ("scheduler", "type")
    if params.get("warmup_type") is None and params.get("warmup_num_steps") != 0:
        params["warmup_type"] = "log"  # DeepSpeed's default
    if algorithm and params.get("warmup_num_steps") is None:
        yield Statement("schedule.warmup_steps", (_WARMUP,), document, path, algorithm, weak=True)
    ratio = params.get("cos_min_ratio", 1e-4)
    lowest = {"WarmupDecayLR": 0.0, "WarmupCosineLR": ratio}.get(str(algorithm))
    if lowest not in (None, "auto"):  # what DeepSpeed ends with
        yield Statement("schedule.min_lr_ratio", (lowest,), document, path, algorithm)


def _optimizer(document: Document, algorithm: str, params: dict, notes: list[str]) -> Iterator[Statement]:
    stands = {f"optimizer.{'epsilon' if key == 'eps' else key}" for key, value in params.items() if value is not None}
    for by, value in _OPTIMIZERS.get(algorithm.lower(), {}).items():
        if by not in stands:
            yield Statement(by, (value,), document, ("optimizer", "type"), algorithm, weak=True)
    if algorithm.lower() == "sgd" and not params.get("momentum"):
        params.pop("momentum", None)
        place = document.place(("optimizer",))
        notes.append(f"{place}: SGD without momentum is not built; optimizer.momentum of the recipe counts")
