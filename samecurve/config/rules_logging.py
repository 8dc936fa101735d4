"""Rules of the recipe's block `logging`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from samecurve.specs.trackers import TRACKERS

Finding = tuple[str, str]


def _installed(value: Callable[[str], Any]) -> Iterator[Finding]:
    for name in value("logging.trackers"):
        module, package = TRACKERS.get(name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            text = f"found {name}, but the package {package} is not installed; run pip install {package}, or remove it"
            yield "logging.trackers", text


def _once(value: Callable[[str], Any]) -> Iterator[Finding]:
    names = value("logging.trackers")
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        yield "logging.trackers", f"names {', '.join(repeated)} more than once; name each tracker once"


RULES = (_installed, _once)
