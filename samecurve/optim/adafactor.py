"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) for sharded weights.

Adafactor keeps only the row and column means of a matrix's second moments. The defaults are those of
torch.optim.Adafactor. torch's own class fails on FSDP2's shards (2.13: no strategy for its norm over a sharded
dimension). The update needs three values of the whole weight: the column means, and the root mean squares (RMS) of the
weight and of the update. They are summed over the shards, with three all-reduces per step and group.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from samecurve.config.schema import Optimizer
from samecurve.optim.base import GroupOptimizer
from samecurve.optim.dtensor import all_reduce_sums, local_gradient, norms, shards_of, to_local

SMALLEST_VARIANCE = torch.finfo(torch.float32).eps
SMALLEST_RMS = 1e-3
CLIPPED_RMS = 1.0


class Adafactor(GroupOptimizer):
    """Adafactor with a relative learning rate: a step is that fraction of max(the weight's RMS, 1e-3).

    The state of a matrix (..., rows, columns) is row_var (..., rows, 1), for this rank's rows, and col_var
    (..., 1, columns). The state of a vector is `variance`, in the vector's shape.
    """

    def __init__(self, params: Iterable, lr: float, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def empty_state(self, weight: Tensor) -> dict:
        """Create a weight's state before its first update; the step counter is an int."""
        part = to_local(weight)
        if weight.dim() < 2:
            return {"step": 0, "variance": torch.zeros_like(weight)}
        columns = (*part.shape[:-2], 1, part.shape[-1])
        return {"step": 0, "row_var": torch.zeros_like(part[..., :1]), "col_var": part.new_zeros(columns)}

    def update_group(self, group: dict, weights: list[Tensor]) -> None:
        """Apply Algorithm 4 of the paper with the learning rate of torch's class: min(rate, 1 / sqrt(step))."""
        shards, rate = shards_of(weights[0]), group["lr"]
        states = self._moments(weights, shards)
        squares = all_reduce_sums([_squares(to_local(weight)) for weight in weights], shards)
        lengths = all_reduce_sums(
            [_squares(self._direction(w, state)) for w, state in zip(weights, states, strict=True)], shards
        )
        for weight, state, square, length in zip(weights, states, squares, lengths, strict=True):
            own, numel = to_local(weight), weight.numel()
            size = (square / numel).sqrt().clamp(min=SMALLEST_RMS) * min(rate, state["step"] ** -0.5)
            clipped = size / ((length / numel).sqrt() / CLIPPED_RMS).clamp(min=1)
            own.mul_(1 - rate * group["weight_decay"])
            # recomputed, because keeping all weights' directions would take as much memory as the model
            own.sub_(self._direction(weight, state) * clipped.to(own.dtype))

    def _moments(self, weights: list[Tensor], shards: ProcessGroup | None) -> list[dict]:
        """Update the moments and return the states; a matrix's also has `row_mean`, the mean of row_var over all rows.

        `shards` is the group of ranks that hold the other shards.
        """
        states, sums = [], []
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = self.empty_state(weight)
            state = self.state[weight]
            states.append(state)
            state["step"] += 1
            squares = local_gradient(weight).square()
            if weight.dim() < 2:
                to_local(state["variance"]).lerp_(squares, _share(state))
            else:
                state["row_var"].lerp_(squares.mean(dim=-1, keepdim=True), _share(state))
                sums.append((squares.sum(dim=-2, keepdim=True), state["row_var"].sum(dim=-2, keepdim=True)))
        # a shard of a matrix holds rows; a shard of a stack of matrices holds whole matrices
        across = [weight.dim() == 2 for weight in weights if weight.dim() > 1]
        exchanged = iter(
            all_reduce_sums([part for pair, over in zip(sums, across, strict=True) if over for part in pair], shards)
        )
        means = iter(
            (next(exchanged), next(exchanged)) if over else pair for pair, over in zip(sums, across, strict=True)
        )
        for index, (weight, state) in enumerate(zip(weights, states, strict=True)):
            if weight.dim() > 1:
                (columns, rows), number = next(means), weight.shape[-2]
                state["col_var"].lerp_(columns / number, _share(state))
                states[index] = state | {"row_mean": rows / number}  # a copy: the optimizer does not keep the mean
        return states

    def _direction(self, weight: Tensor, state: dict) -> Tensor:
        """Divide this rank's part of the gradient by the square root of its estimated variance."""
        if weight.dim() < 2:
            variance = to_local(state["variance"])
        else:
            variance = state["row_var"] @ state["col_var"] / state["row_mean"].clamp(min=SMALLEST_VARIANCE)
        # the bound is squared, because rsqrt takes the root of it, too
        return local_gradient(weight) * variance.clamp(min=SMALLEST_VARIANCE**2).rsqrt()


def _share(state: dict) -> float:
    """Weight of this step's squared gradient in the running means."""
    return state["step"] ** -0.8  # the default of torch's beta2_decay


def _squares(tensor: Tensor) -> Tensor:
    """Sum the squares in fp64, because shards are summed in another order than whole weights."""
    return norms([tensor])[0].square()


def build(groups: list[dict], settings: Optimizer, precision: str, seed: int) -> Adafactor:
    """See build_optimizer."""
    return Adafactor(groups, settings.learning_rate)
