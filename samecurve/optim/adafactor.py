"""Adafactor: of a matrix's second moments only the means of rows and columns are kept (Shazeer and Stern 2018,
arXiv:1804.04235), with the defaults of torch.optim.Adafactor.

torch's own class fails on FSDP2's shards (2.13: no strategy for its norm over a sharded dimension), and its update is
global in three places: the columns' means, and the root mean squares (RMS) of the weight and of the update. Here those
are summed over the shards, three exchanges a step and group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from samecurve.optim.dtensor import all_reduce_sums, shards_of, to_local

SMALLEST_VARIANCE = torch.finfo(torch.float32).eps
SMALLEST_RMS = 1e-3
CLIPPED_RMS = 1.0


class Adafactor(torch.optim.Optimizer):
    """The rate is relative: a step is that part of the weight's RMS, or of 1e-3 where that is larger.

    State of a matrix (..., rows, columns): row_var (..., rows, 1), this rank's rows, and col_var (..., 1, columns); of
    a vector its variance.
    """

    def __init__(self, params: Iterable, lr: float, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def empty_state(self, weight: Tensor) -> dict:
        """What is kept of a weight before its first update; the counter of updates as an int."""
        part = to_local(weight)
        if weight.dim() < 2:
            return {"step": 0, "variance": torch.zeros_like(weight)}
        return {"step": 0, "row_var": torch.zeros_like(part[..., :1]), "col_var": part.new_zeros(_columns(part))}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Algorithm 4 of the paper, with the rate of torch's class: min(rate, 1 / sqrt(step))."""
        assert closure is None
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(group, weights)

    def _update(self, group: dict, weights: list[Tensor]) -> None:
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
            # computed again rather than kept: all weights' directions at once would be a copy of the model
            own.sub_(self._direction(weight, state) * clipped.to(own.dtype))

    def _moments(self, weights: list[Tensor], shards: ProcessGroup | None) -> list[dict]:
        """The states after this step's gradients; a matrix's with `row_mean`, the mean of all rows' row_var."""
        states, sums = [], []
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = self.empty_state(weight)
            state = self.state[weight]
            states.append(state)
            state["step"] += 1
            squares = to_local(weight.grad).square()
            if weight.dim() < 2:
                to_local(state["variance"]).lerp_(squares, _share(state))
            else:
                state["row_var"].lerp_(squares.mean(dim=-1, keepdim=True), _share(state))
                sums.append((squares.sum(dim=-2, keepdim=True), state["row_var"].sum(dim=-2, keepdim=True)))
        # the shards of a matrix hold rows of it; those of a stack of matrices hold whole ones
        across = [weight.dim() == 2 for weight in weights if weight.dim() > 1]
        exchanged = iter(
            all_reduce_sums([part for pair, over in zip(sums, across, strict=True) if over for part in pair], shards)
        )
        means = iter(
            (next(exchanged), next(exchanged)) if over else pair for pair, over in zip(sums, across, strict=True)
        )
        return [state | self._columns(weight, state, means) for weight, state in zip(weights, states, strict=True)]

    def _columns(self, weight: Tensor, state: dict, sums: Iterator[tuple[Tensor, Tensor]]) -> dict:
        if weight.dim() < 2:
            return {}
        (columns, rows), number = next(sums), weight.shape[-2]
        state["col_var"].lerp_(columns / number, _share(state))
        return {"row_mean": rows / number}

    def _direction(self, weight: Tensor, state: dict) -> Tensor:
        """This rank's part of the gradient over the root of its estimated variance."""
        if weight.dim() < 2:
            variance = to_local(state["variance"])
        else:
            variance = state["row_var"] @ state["col_var"] / state["row_mean"].clamp(min=SMALLEST_VARIANCE)
        return to_local(weight.grad) * variance.clamp(min=SMALLEST_VARIANCE**2).rsqrt()


def _share(state: dict) -> float:
    """Of this step's squares in the running means."""
    return state["step"] ** -0.8


def _columns(part: Tensor) -> tuple[int, ...]:
    return (*part.shape[:-2], 1, part.shape[-1]) if part.dim() > 2 else (1, part.shape[-1])


def _squares(tensor: Tensor) -> Tensor:
    """The sum of squares, in fp64: shards are summed in another order than whole weights."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
