"""Checks what a recipe asks of context parallelism: what was compared with one process is allowed, all else refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samecurve.specs.tasks import TASKS
from samecurve.strategy.allowed import OFF, Value, refuse_offload, rule

if TYPE_CHECKING:
    from samecurve.config.documents import Document
    from samecurve.strategy.plan import Strategy

_BLOCK = "parallelism_config"
_ULYSSES, _GATHERED = f"{_BLOCK}_sp_size", f"{_BLOCK}_cp_size"
_COMM, _SEQUENCE = f"{_BLOCK}_cp_comm_strategy", f"{_BLOCK}_tp_sequence_parallel"
_UNTESTED = "has not been compared with one process under context parallelism"
# By key: what is allowed, and why nothing else is.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "precision": (("fp32", "bf16"), f"fp16's loss scale {_UNTESTED}"),
    "adapter.name": ((None, "lora"), f"this adapter {_UNTESTED}"),
    "fp8": (OFF, f"fp8 {_UNTESTED}"),
    "model.kernels": (("torch", None), f"Liger's kernels {_UNTESTED}"),
    "model.attention": (("auto", "sdpa", "varlen"), "the ranks that share a row cannot exchange its inputs"),
    "loss.implementation": (("auto", "full", "chunked"), f"Liger's kernel {_UNTESTED}"),
    "compile": (("off", "auto", "regional", False, None), f"a whole compiled model {_UNTESTED}"),
    "memory.activation_checkpointing": (("none", "full", "selective"), f"this kind of recomputation {_UNTESTED}"),
}


def _applies(strategy: Strategy) -> bool:
    return strategy.dims.cp > 1


def _task(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    task = value("task")
    if _applies(strategy) and TASKS[task].undivided:
        yield "task", f"found {task}, but {TASKS[task].undivided}; use configs/fsdp.yaml"


def _attention(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    found = value("model.attention")
    if strategy.context_parallel == "allgather" and found == "varlen":
        text = "found varlen, but it needs the queries of whole rows and a rank has only some of them"
        yield "model.attention", f"{text}; use auto or sdpa, or configs/fsdp_ulysses.yaml"
    if strategy.context_parallel == "ring" and found in ("sdpa", "varlen"):
        text = f"found {found}, but {_COMM}: alltoall has its own attention, which merges the blocks of a ring"
        yield "model.attention", f"{text}; use auto, or remove that key from the strategy"


def check_accelerate(document: Document) -> None:
    """Add the problems of an Accelerate YAML that cuts sequences."""
    kind = document.get("distributed_type")
    sizes = {key: document.get(_BLOCK, key) for key in (_ULYSSES, _GATHERED)}
    given = [key for key, size in sizes.items() if size is not None]
    above_one = [key for key, size in sizes.items() if isinstance(size, int) and size > 1]
    if kind == "MULTI_GPU":
        for key in given:
            text = f"only FSDP uses it, but distributed_type is {kind} ({document.place(('distributed_type',))})"
            document.problem((_BLOCK, key), f"{text}; remove it, or start from configs/fsdp_ulysses.yaml")
    comm = document.get(_BLOCK, _COMM)
    if comm is not None and _GATHERED not in above_one:
        text = f"found {comm}, but it is read only where {_GATHERED} is above 1"
        document.problem((_BLOCK, _COMM), f"{text}; set that size, or remove this key")
    if kind != "FSDP" or not above_one:
        return
    if len(above_one) > 1:
        text = f"found {sizes[_GATHERED]}, but {_ULYSSES} is {sizes[_ULYSSES]} and a sequence can be split only once"
        document.problem((_BLOCK, _GATHERED), f"{text}; remove one of them")
    refuse_offload(document, _UNTESTED)
    key = f"{_BLOCK}_dp_replicate_size"
    found = document.get(_BLOCK, key)
    if found not in (None, 1):
        text = f"found {found}, but it {_UNTESTED}; remove it, so that all other processes are shards"
        document.problem((_BLOCK, key), text)
    if document.get(_BLOCK, _SEQUENCE) is True:
        text = f"found true, but a sequence that is split in two ways {_UNTESTED}; set it to false"
        document.problem((_BLOCK, _SEQUENCE), text)


RULES = (_task, _attention, *(rule(_applies, key, allowed, why) for key, (allowed, why) in _ALLOWED.items()))
