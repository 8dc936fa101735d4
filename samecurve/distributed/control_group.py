"""Communication between ranks outside training: small objects, on the CPU, in process groups of their own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

# The watchdog ends an operation that a rank never joins (watchdog.timeout_seconds), and this timeout only has to exceed
# the watchdog's. It alone limits the creation of the first group, before ranks see each other's heartbeats.
TIMEOUT = timedelta(hours=24)


def lengthen_default_timeouts() -> None:
    """Make TIMEOUT the default of every process group that is created from now on.

    DeepSpeed's and HSDP's groups are created with torch's default: 10 minutes with NCCL, which then aborts the process
    without stacks or an exit code of ours, also while a large model is still being read. There is no public setting.
    """
    distributed_c10d._get_default_timeout = lambda backend: TIMEOUT


class ControlGroup:
    """A gloo process group of all ranks; each instance has its own.

    Construction is collective and follows torch.distributed's initialization. With a single process, no group is
    created and every operation returns at once.
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
        """Gather one value per rank, in rank order, on all ranks. Also a barrier."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def sum(self, values: Sequence[int]) -> list[int]:
        """Add up each value over the ranks. Collective."""
        if self._group is None:
            return [*values]
        total = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def new(self) -> ControlGroup:
        """Create another group of the same ranks, for a thread that runs in parallel with training. Collective."""
        return ControlGroup()

    def first_nonempty(self, text: str) -> str:
        """Return the text of the lowest rank with a non-empty one, else "". Collective.

        Costs one small all-reduce if all texts are empty.
        """
        if self._group is None:
            return text
        given = torch.tensor([1 if text else 0], dtype=torch.uint8)
        dist.all_reduce(given, op=dist.ReduceOp.MAX, group=self._group)
        return next(filter(None, self.all_gather_object(text)), "") if given.item() else ""
