"""What ranks tell each other outside of training: small things, over the CPU, on groups of their own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

# The watchdog ends an operation that a rank never joins (watchdog.timeout_seconds); this is only above it, and the only
# end for the first group, which all ranks make before they see each other's heartbeats.
TIMEOUT = timedelta(hours=24)


class ControlGroup:
    """All ranks make it together, once the process group stands. Alone in the world everything is immediate.

    Each instance has a process group of its own.
    """

    def __init__(self) -> None:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.size = 1 if alone else dist.get_world_size()
        self.rank = 0 if alone else dist.get_rank()
        self._group = None if alone else dist.new_group(backend="gloo", timeout=TIMEOUT)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; a barrier too."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def new(self) -> ControlGroup:
        """The same ranks in a group of its own, for a thread that runs beside training. Collective."""
        return ControlGroup()

    def first_nonempty(self, text: str) -> str:
        """The text of the lowest rank that has one, "" when none has: one small all-reduce unless there is one."""
        if self._group is None:
            return text
        given = torch.tensor([1 if text else 0], dtype=torch.uint8)
        dist.all_reduce(given, op=dist.ReduceOp.MAX, group=self._group)
        return next(filter(None, self.all_gather_object(text)), "") if given.item() else ""
