"""Checks what a recipe asks of expert parallelism: what was compared with one process is allowed, all else refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from samecurve.config.documents import describe
from samecurve.specs.environment import dated
from samecurve.specs.optimizers import OPTIMIZERS
from samecurve.strategy.allowed import OFF, Value, refuse_offload, rule

if TYPE_CHECKING:
    from samecurve.config.documents import Document
    from samecurve.strategy.plan import Strategy

_BLOCK = "parallelism_config"
SIZE = f"{_BLOCK}_ep_size"
_UNTESTED = "has not been compared with one process under expert parallelism"
# By key: what is allowed, and why nothing else is.
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "precision": (
        ("fp32", "bf16"),
        f"in fp16, FSDP2 of {dated('torch')} divides the gradients of unsharded experts once too often",
    ),
    "adapter.name": ((None, "lora"), f"this adapter {_UNTESTED}"),
    "fp8": (OFF, "torchao replaces linear layers only, and experts are none"),
    "model.kernels": (("torch", None), f"a Liger kernel {_UNTESTED}"),
    "loss.implementation": (("auto", "full", "chunked"), f"Liger's kernel {_UNTESTED}"),
    "compile": (
        ("off", "auto", False, None),
        f"all_to_all_single of {dated('torch')} takes the tokens of each rank as numbers of the host, which "
        "it reads in each layer",
    ),
    "memory.activation_checkpointing": (("none", "full", "selective"), f"this kind of recomputation {_UNTESTED}"),
    "memory.gradient_sync": (("auto",), f"the key {_UNTESTED}"),
}


def _applies(strategy: Strategy) -> bool:
    return strategy.dims.ep > 1


def _optimizer(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
    name = value("optimizer.name")
    spec = OPTIMIZERS.get(name)
    if _applies(strategy) and spec is not None and (spec.whole or name == "adamw_bf16"):
        why = f"it {spec.whole}, and {_UNTESTED}" if spec.whole else f"it {_UNTESTED}"
        yield "optimizer.name", f"found {name}, but {why}; use adamw, lion or sgd, or configs/fsdp.yaml"


def check_accelerate(document: Document) -> None:
    """Add the problems of an Accelerate YAML that spreads experts."""
    kind, size = document.get("distributed_type"), document.get(_BLOCK, SIZE)
    if kind == "MULTI_GPU" and size is not None:
        text = f"only FSDP uses it, but distributed_type is {kind} ({document.place(('distributed_type',))})"
        document.problem((_BLOCK, SIZE), f"{text}; remove it, or start from configs/fsdp_ep.yaml")
    if kind != "FSDP" or not isinstance(size, int) or size < 2:
        return
    refuse_offload(document, _UNTESTED)
    for key in ("dp_replicate_size", "cp_size", "sp_size", "tp_sequence_parallel"):
        found = document.get(_BLOCK, f"{_BLOCK}_{key}")
        if found is True or found not in (None, 1, False):  # True == 1
            text = f"found {describe(found)}, but together with {SIZE} it {_UNTESTED}; remove one of the two"
            document.problem((_BLOCK, f"{_BLOCK}_{key}"), text)


RULES = (_optimizer, *(rule(_applies, key, allowed, why) for key, (allowed, why) in _ALLOWED.items()))
