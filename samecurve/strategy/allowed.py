"""Rules that allow the values of a recipe's key that were compared with one process, and refuse all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from samecurve.config.documents import describe, joined

if TYPE_CHECKING:
    from samecurve.config.documents import Document
    from samecurve.strategy.plan import Strategy

Value = Callable[[str], Any]
Rule = Callable[[Value, "Strategy"], Iterator[tuple[str, str]]]
OFF = ("off", False, None)  # YAML reads a bare off as false


def rule(
    applies: Callable[[Strategy], bool],
    key: str,
    allowed: tuple[Any, ...],
    why: str,
    instead: str = "configs/fsdp.yaml",
) -> Rule:
    """Return a rule that refuses a key's value under the strategies it applies to, unless the value is allowed.

    Args:
        allowed: the values that were compared with one process.
        why: the reason for the message why no other value is allowed.
        instead: what the message suggests for other values: a strategy file, or words.
    """

    def check(value: Value, strategy: Strategy) -> Iterator[tuple[str, str]]:
        found = value(key)
        if applies(strategy) and found not in allowed:
            # false is a bare off, which "off" names already; alone it is the value of a switch
            usual = [each for each in allowed if each is not False] or allowed
            yield key, f"found {_as_typed(found)}, but {why}; use {joined(map(_as_typed, usual))}, or {instead}"

    return check


def _as_typed(value: Any) -> str:
    return value if isinstance(value, str) else describe(value)


def refuse_offload(document: Document, why: str) -> None:
    """Add a problem if an Accelerate YAML keeps shards in host memory. why: continues the message after "offload"."""
    key = "fsdp_config", "fsdp_offload_params"
    if document.get(*key) is True:
        document.problem(key, f"found true, but offload {why}; set it to false")
