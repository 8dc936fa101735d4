"""Lion: the sign of a mean of gradients (Chen et al. 2023, arXiv:2302.06675, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from samecurve.config.schema import Optimizer
from samecurve.optim.base import GroupOptimizer
from samecurve.optim.dtensor import local_gradient, to_local


class Lion(GroupOptimizer):
    """Lion, which keeps one state per weight and moves every weight by the learning rate.

    For that reason its authors use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the
    same factor.
    """

    def __init__(self, params: Iterable, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update_group(self, group: dict, weights: list[Tensor]) -> None:
        """Apply c = beta1 m + (1 - beta1) g;  w -= rate (sign(c) + decay w);  m = beta2 m + (1 - beta2) g."""
        beta1, beta2 = group["betas"]
        for weight in weights:
            if "exp_avg" not in self.state[weight]:
                self.state[weight]["exp_avg"] = torch.zeros_like(weight)
        means = [to_local(self.state[weight]["exp_avg"]) for weight in weights]
        gradients, weights = [local_gradient(weight) for weight in weights], [to_local(weight) for weight in weights]
        # the update is elementwise and needs no other shard; empty shards are left out
        chosen = [index for index, weight in enumerate(weights) if weight.numel()]
        weights, gradients, means = ([tensors[i] for i in chosen] for tensors in (weights, gradients, means))
        if not weights:
            return
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        directions = torch._foreach_lerp(means, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(weights, directions, alpha=-group["lr"])
        torch._foreach_lerp_(means, gradients, 1 - beta2)


def build(groups: list[dict], settings: Optimizer, precision: str, seed: int) -> Lion:
    """See build_optimizer."""
    return Lion(groups, settings.learning_rate, settings.betas)
