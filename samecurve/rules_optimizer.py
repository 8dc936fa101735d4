"""What the keys of a recipe's `optimizer` block have to do with one another."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from .config import Optimizer
from .documents import describe
from .optim import TRAITS


def optimizer(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """A package that is missing; keys that the named optimizer has no use for, which would do nothing."""
    name = value("optimizer.name")
    if name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield "optimizer.name", f"found {name}, which needs the package bitsandbytes: pip install bitsandbytes"
    for key in sorted({key for traits in TRAITS.values() for key in traits.reads} - {*TRAITS[name].reads}):
        found = value(f"optimizer.{key}")
        default = Optimizer.model_fields[key].default
        if (tuple(found) if isinstance(found, list) else found) != default:
            *others, last = (other for other, traits in TRAITS.items() if key in traits.reads)
            readers = f"{', '.join(others)} and {last} read" if others else f"{last} reads"
            text = f"found {describe(found)}, but only {readers} it and optimizer.name is {name}; leave it out"
            yield f"optimizer.{key}", text
