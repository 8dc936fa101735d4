"""What more than one key of a recipe takes part in, of memory and compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .config import Memory

Finding = tuple[str, str]
_READ_BY = {"selective_keeps": "selective", "every_k": "every_k"}


def memory(value: Callable[[str], Any]) -> Iterator[Finding]:
    kind = value("memory.activation_checkpointing")
    for key, reader in _READ_BY.items():
        found = value(f"memory.{key}")
        if kind != reader and found != Memory.model_fields[key].default:
            text = f"found {found}, but only {reader} reads it and memory.activation_checkpointing is {kind}"
            yield f"memory.{key}", f"{text}; leave it out"
    if value("compile") == "full" and kind == "offload":
        text = "found full, but a copy to host memory ends what can be compiled, and offload makes one in every layer"
        yield "compile", f"{text}; use regional"
