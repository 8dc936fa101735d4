"""Which optimizers a strategy can run: told before torch is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..recipe import Source

if TYPE_CHECKING:
    from .resolve import Strategy

_DEEPSPEED = ("zero", "pipeline")


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
    return None
