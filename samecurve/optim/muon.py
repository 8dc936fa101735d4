"""Muon: momentum whose matrices are orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon), and AdamW
for what is no hidden matrix. Its steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that
one learning rate and one weight decay serve both.

torch.optim.Muon is the same for a matrix in bf16; it knows no other precision, in which strategies agree to 1e-5, no
shards and no second kind of weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from samecurve.optim.dtensor import to_local

# of the polynomial that drives all singular values near 1 in five rounds
A, B, C = 3.4445, -4.7750, 2.0315
ROUNDS = 5
SMALLEST_NORM = 1e-7
RMS_OF_ADAMW = 0.2


class Muon(torch.optim.Optimizer):
    """groups: optim.parameter_groups'; `muon` says which are matrices. dtype: what orthogonalising computes in.

    A rank of FSDP gathers each matrix's update and orthogonalises all of them: nothing of it is divided over ranks.
    """

    def __init__(
        self,
        groups: list[dict],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ):
        matrices = [group | {"momentum": momentum} for group in groups if group["muon"]]
        others = [group for group in groups if not group["muon"]]
        super().__init__(matrices or others, {"lr": lr})
        self._dtype, self._adamw = dtype, None
        self._matrices = self.param_groups if matrices else []
        if others:
            self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
            # the same dictionaries: a rate that is set, or a state that is loaded, is seen by both
            self.param_groups, self.state = [*self._matrices, *self._adamw.param_groups], self._adamw.state

    def empty_state(self, weight: Tensor) -> dict:
        """What is kept of a weight before its first update."""
        if any(weight is other for group in self._matrices for other in group["params"]):
            return {"momentum_buffer": torch.zeros_like(weight)}
        step = torch.tensor(0.0, dtype=torch.float32, device=weight.device)
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """m = momentum m + (1 - momentum) g;  w -= rate (decay w + 0.2 sqrt(max(rows, columns)) O), where O is
        (1 - momentum) g + momentum m made orthogonal."""
        assert closure is None
        for group in self._matrices:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(group, weight)
        if self._adamw is not None:
            self._adamw.step()

    def _update(self, group: dict, weight: Tensor) -> None:
        if not self.state[weight]:
            self.state[weight] = self.empty_state(weight)
        mean, gradient, momentum = self.state[weight]["momentum_buffer"], weight.grad, group["momentum"]
        to_local(mean).lerp_(to_local(gradient), 1 - momentum)
        to_local(gradient).lerp_(to_local(mean), momentum)  # in place: the gradient is not needed again
        direction = _like(orthogonalize(_full(gradient).to(self._dtype)), weight)
        own, rate = to_local(weight), group["lr"]
        own.mul_(1 - rate * group["weight_decay"])
        own.add_(direction.to(own.dtype), alpha=-rate * RMS_OF_ADAMW * math.sqrt(max(weight.shape)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """U V^T of the matrix U S V^T, nearly: the singular values come out between about 0.7 and 1.2."""
    upright = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if upright else matrix
    found = found / found.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ROUNDS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=B, alpha=C), found, beta=A)
    return found.T if upright else found


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(full: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of what every rank has; nothing is sent (src_data_rank=None)."""
    if not isinstance(weight, DTensor):
        return full
    placed = distribute_tensor(full.contiguous(), weight.device_mesh, weight.placements, src_data_rank=None)
    return placed.to_local()
