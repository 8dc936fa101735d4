"""The loop that optimizers with one update per parameter group share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class GroupOptimizer(torch.optim.Optimizer):
    """Base class of optimizers that update all weights of a parameter group together."""

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Update the weights that have a gradient, group by group. Closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self.update_group(group, weights)

    def update_group(self, group: dict, weights: list[Tensor]) -> None:
        """Update the non-empty list of a group's weights in place. Each of them has a gradient."""
        raise NotImplementedError
