"""Checks what a recipe asks of tensor parallelism: what was compared with one process is allowed, all else refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samecurve.specs.data_names import WIDTH_MULTIPLE
from samecurve.specs.environment import dated
from samecurve.specs.optimizers import OPTIMIZERS
from samecurve.specs.tasks import TASKS
from samecurve.strategy.allowed import OFF, Value, refuse_offload, rule

if TYPE_CHECKING:
    from samecurve.config.documents import Document
    from samecurve.strategy.plan import Strategy

_SEQUENCE = "parallelism_config_tp_sequence_parallel"
_SHARDED = ("parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size")
_UNTESTED = "has not been compared with one process under tensor parallelism"
# By key: what is allowed, and why nothing else is.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "task": (
        tuple(name for name, spec in TASKS.items() if not spec.fills_masks),
        f"no encoder family has a tensor-parallel plan in {dated('transformers')}",
    ),
    "precision": (("fp32", "bf16"), f"fp16's loss scale {_UNTESTED}"),
    "adapter.dora": ((False,), "DoRA's norms need whole rows of weights that are split across ranks"),
    "fp8": (OFF, "torchao replaces the linear layers that tensor parallelism splits"),
    "model.kernels": (("torch", None), "Liger's kernels read whole weights"),
    "loss.implementation": (("auto", "full", "chunked"), "Liger's kernel reads the whole output head"),
    "compile": (("off", "auto", "regional", False, None), f"a whole compiled model {_UNTESTED}"),
    "memory.gradient_sync": (("auto",), f"the key {_UNTESTED}"),
}


def _optimizer(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    name = value("optimizer.name")
    spec = OPTIMIZERS.get(name)
    if strategy.tensor_parallel_size > 1 and spec is not None and (spec.whole or name == "adamw_bf16"):
        why = f"it {spec.whole}, of which a rank has only some columns" if spec.whole else f"it {_UNTESTED}"
        yield "optimizer.name", f"found {name}, but {why}; use adamw, lion or sgd, or configs/fsdp.yaml"


def _applies(strategy: Strategy) -> bool:
    return strategy.tensor_parallel_size > 1


def _sequence(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    found, size = value("batch.sequence_length"), strategy.tensor_parallel_size
    if strategy.tp_sequence_parallel and found % size:
        text = f"found {found}, which cannot be divided over {size} ranks ({strategy.path}: {_SEQUENCE})"
        yield "batch.sequence_length", f"{text}; use a multiple of {size}, or set {_SEQUENCE} to false"
    # shorter rows are all padded to sequence_length, which is checked above
    grouped = value("data.group_by_length") and found > WIDTH_MULTIPLE
    if strategy.tp_sequence_parallel and grouped and WIDTH_MULTIPLE % size:
        text = f"found true, so rows are padded to multiples of {WIDTH_MULTIPLE} tokens, which cannot be divided over"
        fix = f"set it or {_SEQUENCE} to false"
        yield "data.group_by_length", f"{text} {size} ranks ({strategy.path}: {_SEQUENCE}); {fix}"


def check_accelerate(document: Document) -> None:
    """Add the problems of an Accelerate YAML with a tensor-parallel size, or with a block that its type cannot use."""
    kind, block = document.get("distributed_type"), "parallelism_config"
    size, (replicas, _) = document.get(block, "parallelism_config_tp_size"), _SHARDED
    if kind == "MULTI_GPU":
        for key in (key for key in _SHARDED if document.get(block, key) is not None):
            text = f"only FSDP uses it, but distributed_type is {kind} ({document.place(('distributed_type',))})"
            document.problem((block, key), f"{text}; remove it, or start from configs/fsdp_tp.yaml")
    if document.get(block, _SEQUENCE) is True and (not isinstance(size, int) or size < 2):
        text = "found true, but only tensor parallelism uses it"
        document.problem((block, _SEQUENCE), f"{text}; remove it, or set parallelism_config_tp_size")
    if kind != "FSDP" or not isinstance(size, int) or size < 2:
        return
    refuse_offload(document, _UNTESTED)
    found = document.get(block, replicas)
    if found not in (None, 1):
        text = f"found {found}, but a model in several replicas {_UNTESTED}"
        document.problem((block, replicas), f"{text}; remove it, so that all other processes are shards")


RULES = (_optimizer, _sequence, *(rule(_applies, key, allowed, why) for key, (allowed, why) in _ALLOWED.items()))
