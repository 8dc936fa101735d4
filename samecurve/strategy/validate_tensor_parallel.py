"""Checks what a recipe asks of tensor parallelism: what was compared with one process is allowed, all else refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from samecurve.specs.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from samecurve.config.documents import Document
    from samecurve.strategy.plan import Strategy

Value = Callable[[str], Any]
_SHARDED = ("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size")
_UNTESTED = "has not been compared with one process under tensor parallelism"
OFF = ("off", False, None)  # YAML reads a bare off as false
# By key: what is allowed, and why nothing else is.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "task": (("pretrain", "sft"), f"the task {_UNTESTED}"),
    "precision": (("fp32", "bf16"), f"fp16's loss scale {_UNTESTED}"),
    "adapter.name": ((None,), "an adapter's matrices would have to be cut as the layers around them are"),
    "fp8": (OFF, "torchao's layers take the place of those that are cut"),
    "model.kernels": (("torch", None), "Liger's kernels read whole weights"),
    "loss.implementation": (("auto", "full", "chunked"), "Liger's kernel reads the whole output head"),
    "compile": (("off", "auto", False, None), f"a compiled layer {_UNTESTED}"),
    "memory.activation_checkpointing": (("none",), f"recomputing it {_UNTESTED}"),
    "memory.gradient_sync": (("auto",), f"the key {_UNTESTED}"),
}


def _optimizer(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    name = value("optimizer.name")
    spec = OPTIMIZERS.get(name)
    if strategy.tensor_parallel_size > 1 and spec is not None and (spec.whole or name == "adamw_bf16"):
        why = f"it {spec.whole}, of which a rank has only some columns" if spec.whole else f"it {_UNTESTED}"
        yield "optimizer.name", f"found {name}, but {why}; use adamw, lion or sgd, or configs/fsdp.yaml"


def _rule(key: str, allowed: tuple[Any, ...], why: str) -> Callable[[Value, Strategy], Iterator[tuple[str, str]]]:
    def rule(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
        found = value(key)
        if strategy.tensor_parallel_size > 1 and found not in allowed:
            shown = " or ".join("null" if each is None else str(each) for each in allowed if each is not False)
            yield key, f"found {found}, but {why}; use {shown}, or configs/fsdp.yaml"

    return rule


def check_accelerate(document: Document) -> None:
    """Add the problems of an Accelerate YAML with a tensor-parallel size, or with a block that its type cannot use."""
    kind, block = document.get("distributed_type"), "parallelism_config"
    size, (replicas, _) = document.get(block, "parallelism_config_tp_size"), _SHARDED
    if kind == "MULTI_GPU":
        for key in (key for key in _SHARDED if document.get(block, key) is not None):
            text = f"only FSDP uses it, but distributed_type is {kind} ({document.place(('distributed_type',))})"
            document.problem((block, key), f"{text}; remove it, or start from configs/fsdp_tp.yaml")
    if kind != "FSDP" or not isinstance(size, int) or size < 2:
        return
    if document.get("fsdp_config", "fsdp_offload_params") is True:
        text = f"found true, but offload {_UNTESTED}; set it to false"
        document.problem(("fsdp_config", "fsdp_offload_params"), text)
    found = document.get(block, replicas)
    if found not in (None, 1):
        text = f"found {found}, but a model in several replicas {_UNTESTED}"
        document.problem((block, replicas), f"{text}; remove it, so that all other processes are shards")


RULES = (_optimizer, *(_rule(key, allowed, why) for key, (allowed, why) in _ALLOWED.items()))
