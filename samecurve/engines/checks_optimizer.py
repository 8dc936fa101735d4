"""Which optimizers a strategy can run: told before torch is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..optim import TRAITS
from ..recipe import Source

if TYPE_CHECKING:
    from .resolve import Strategy

_DEEPSPEED = ("zero", "pipeline")
_UNSHARDED = ("single", "ddp")


def check(source: Source, strategy: Strategy) -> None:
    """Adds a problem at optimizer.name. Raises KeyError where that is itself wrong."""
    name = source.value("optimizer.name")
    text = _refusal(name, strategy)
    if text:
        source.document.problem(("optimizer", "name"), f"found {name}, but {text}")


def _refusal(name: str, strategy: Strategy) -> str | None:
    offloaded = [part for part in strategy.offload if part.startswith("optimizer:")]
    if offloaded and strategy.family in _DEEPSPEED and name != "adamw":
        return (
            "DeepSpeed updates an offloaded optimizer with its own CPU Adam, whatever it is given; use adamw, "
            "or a strategy without offload, for example configs/zero3.yaml"
        )
    if name == "adamw_bf16" and strategy.family in _DEEPSPEED:
        return (
            "DeepSpeed keeps fp32 copies of bf16 weights itself and hands those to the optimizer; use "
            "configs/fsdp.yaml or configs/ddp.yaml, or adamw"
        )
    whole = TRAITS[name].whole
    if name == "adamw_8bit" and strategy.family not in _UNSHARDED:
        return f"it {whole}, which shards would cut elsewhere; use configs/ddp.yaml, or adamw or lion"
    if whole and strategy.family in _DEEPSPEED:
        return (
            f"it {whole}, and DeepSpeed hands an optimizer parts of many weights in one flat tensor; use "
            "configs/fsdp.yaml or configs/ddp.yaml, or adamw, lion or sgd"
        )
    if whole and offloaded:
        return f"it {whole}, which ranks would have to exchange from host memory; use configs/fsdp.yaml, or adamw"
    return None
