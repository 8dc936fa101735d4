"""Rules for `profile`, given the number of steps and of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from samecurve.config.source import InvalidValue, RecipeSource

Finding = tuple[str, str]


def _order(value: Callable[[str], Any]) -> Iterator[Finding]:
    first, last = value("profile.steps") or (1, 1)
    if first > last:
        yield "profile.steps", f"found [{first}, {last}], but the first step comes after the last one; swap them"


def _end(value: Callable[[str], Any]) -> Iterator[Finding]:
    first, last = value("profile.steps") or (1, 1)
    if first <= last and last > value("steps"):
        yield "profile.steps", f"found [{first}, {last}], but steps is {value('steps')}; end at that step or earlier"


RULES = _order, _end


def check_ranks(source: RecipeSource, world_size: int) -> None:
    """Add a problem for a rank in profile.ranks that does not exist."""
    with contextlib.suppress(InvalidValue):
        absent = [rank for rank in source.value("profile.ranks") if rank >= world_size]
        if absent:
            known = f"{world_size} processes have ranks 0 to {world_size - 1}"
            known = known if world_size > 1 else "1 process has rank 0"
            text = f"found {absent[0]}, but {known} only; remove the others"
            source.document.problem(("profile", "ranks"), text)
