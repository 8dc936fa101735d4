"""Checks which optimizers a strategy can run, before torch is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from samecurve.errors import ConfigurationError
from samecurve.specs.optimizers import BLOCK_8BIT, OPTIMIZERS, SMALLEST_8BIT

if TYPE_CHECKING:
    from samecurve.strategy.plan import Strategy

_DEEPSPEED = ("zero", "pipeline")


def _name(value: Callable[[str], Any], strategy: Strategy) -> Iterator[tuple[str, str]]:
    name = value("optimizer.name")
    text = _refusal(name, strategy)
    if text:
        yield "optimizer.name", f"found {name}, but {text}"


def _implementation(value: Callable[[str], Any], strategy: Strategy) -> Iterator[tuple[str, str]]:
    implementation = value("optimizer.implementation")
    if strategy.family in _DEEPSPEED and strategy.offloads_optimizer and implementation != "fused":
        why = "DeepSpeed updates an offloaded optimizer with its own CPU Adam"
        yield "optimizer.implementation", f"found {implementation}, but {why}; remove it"


RULES = _name, _implementation


def _refusal(name: str, strategy: Strategy) -> str | None:
    offloaded = strategy.offloads_optimizer
    if offloaded and strategy.family in _DEEPSPEED and name != "adamw":
        return (
            "DeepSpeed updates an offloaded optimizer with its own CPU Adam, whatever is configured; use adamw, "
            "or a strategy without offload, for example configs/zero3.yaml"
        )
    if name == "adamw_bf16" and strategy.family in _DEEPSPEED:
        return (
            "DeepSpeed makes fp32 copies of bf16 weights and passes those to the optimizer; use "
            "configs/fsdp.yaml or configs/ddp.yaml, or adamw"
        )
    whole = OPTIMIZERS[name].whole
    if whole and strategy.family in _DEEPSPEED:
        return (
            f"it {whole}, and DeepSpeed passes parts of many weights to the optimizer as one flat tensor; use "
            "configs/fsdp.yaml or configs/ddp.yaml, or adamw, lion or sgd"
        )
    if name == "adamw_8bit" and offloaded:
        return "its kernels are untested on shards in host memory; use configs/fsdp.yaml, or adamw"
    if whole and offloaded:
        return f"it {whole}, which ranks would have to exchange from host memory; use configs/fsdp.yaml, or adamw"
    return None


def check_shards(name: str, shapes: Mapping[str, Sequence[int]], num_shards: int) -> None:
    """Check that shards do not cut an optimizer's blocks, or else the number of shards would change the loss curve.

    Args:
        name: optimizer.name.
        shapes: full parameter shapes by name; shards are cut along the first dimension.
        num_shards: the number of shards of each parameter.

    Raises:
        ConfigurationError: where a shard would cut a block.
    """
    if name != "adamw_8bit":
        return
    for parameter, (rows, *others) in shapes.items():
        # FSDP2 cuts with torch.chunk, whose chunks have ceil(rows / shards) rows as long as there are any
        each = -(-rows // num_shards) * math.prod(others)
        if rows * math.prod(others) >= SMALLEST_8BIT and each % BLOCK_8BIT:
            raise ConfigurationError(
                f"optimizer.name: found adamw_8bit, which {OPTIMIZERS[name].whole}, but each of {num_shards} shards of "
                f"{parameter} {(rows, *others)} has {each} values, not a multiple of {BLOCK_8BIT}; use another "
                "number of processes, configs/ddp.yaml, or adamw"
            )
