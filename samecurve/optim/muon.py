"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for hidden matrices, with AdamW for all other weights.

Muon orthogonalizes the momentum of a matrix, and in a stack of experts, (experts, rows, columns), that of each expert.
Its steps are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that one learning rate and one
weight decay serve both.

torch.optim.Muon computes the same for a matrix in bf16. It supports no other precision (strategies agree to 1e-5 in
fp32), no shards and no weights other than matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from samecurve.config.schema import Optimizer
from samecurve.optim.dtensor import local_gradient, to_local

# Coefficients of the polynomial that drives all singular values near 1 in five iterations.
A, B, C = 3.4445, -4.7750, 2.0315
ROUNDS = 5
SMALLEST_NORM = 1e-7  # eps of torch.optim.Muon
RMS_OF_ADAMW = 0.2  # about the root mean square of AdamW's updates, from Liu et al.


class Muon(torch.optim.Optimizer):
    """Muon for the groups of hidden matrices and AdamW for the other groups.

    Under FSDP every rank gathers and orthogonalizes the updates of all matrices; that work is not divided over ranks.
    A stack of experts is sharded by experts, so that each rank orthogonalizes its own and nothing is gathered.

    Args:
        groups: from optim.parameter_groups; the key `muon` marks groups of hidden matrices.
        lr: learning rate.
        momentum: decay rate of Muon's momentum.
        betas: decay rates of AdamW's moments.
        eps: epsilon of AdamW's denominator.
        dtype: dtype of the orthogonalization.
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
        super().__init__(matrices or others, {"lr": lr})  # torch refuses an empty list of parameters
        self._dtype, self._adamw = dtype, None
        self._matrices = self.param_groups if matrices else []
        if others:
            self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
            # shared dictionaries, so that a new learning rate or a loaded state reaches both optimizers
            self.param_groups, self.state = [*self._matrices, *self._adamw.param_groups], self._adamw.state

    def empty_state(self, weight: Tensor) -> dict:
        """Create a weight's state before its first update."""
        if any(weight is other for group in self._matrices for other in group["params"]):
            return {"momentum_buffer": torch.zeros_like(weight)}
        step = torch.tensor(0.0, dtype=torch.float32, device=weight.device)
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Apply m = momentum m + (1 - momentum) g;  w -= rate (decay w + 0.2 sqrt(max(rows, columns)) O).

        O is the orthogonalized (1 - momentum) g + momentum m.
        """
        assert closure is None
        for group in self._matrices:
            momentum, rate = group["momentum"], group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.state[weight] = self.empty_state(weight)
                mean, gradient = to_local(self.state[weight]["momentum_buffer"]), weight.grad
                mean.lerp_(local_gradient(weight), 1 - momentum)
                local_gradient(weight).lerp_(mean, momentum)  # in place: the gradient is not needed again
                # FSDP2 cuts dimension 0: a stack's shards are whole experts; strategies with other cuts refuse muon
                is_matrix, full = weight.dim() == 2, local_gradient(weight)
                if is_matrix and isinstance(gradient, DTensor):
                    full = gradient.full_tensor()
                direction = orthogonalize(full.to(self._dtype))
                if is_matrix and isinstance(weight, DTensor):
                    # every rank has the direction in full and takes its shard without communication
                    # (src_data_rank=None)
                    mesh, placements = weight.device_mesh, weight.placements
                    whole = direction.contiguous()
                    direction = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                own = to_local(weight)
                own.mul_(1 - rate * group["weight_decay"])
                own.add_(direction.to(own.dtype), alpha=-rate * RMS_OF_ADAMW * math.sqrt(max(weight.shape[-2:])))
        if self._adamw is not None:
            self._adamw.step()


def orthogonalize(matrices: Tensor) -> Tensor:
    """Compute approximately U V^T of each matrix U S V^T; the results' singular values lie between about 0.7 and 1.2.

    `matrices` and the result: (rows, columns) or (matrices, rows, columns).
    """
    upright = matrices.shape[-2] > matrices.shape[-1]  # then its transpose has the smaller Gram matrix
    wide = matrices.mT if upright else matrices
    flat = wide if wide.dim() == 3 else wide[None]
    flat = flat / torch.linalg.matrix_norm(flat, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ROUNDS):
        gram = flat @ flat.mT
        flat = torch.baddbmm(flat, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), flat, beta=A)
    wide = flat.view(wide.shape)
    return wide.mT if upright else wide


def build(groups: list[dict], settings: Optimizer, precision: str, seed: int) -> Muon:
    """See build_optimizer."""
    return Muon(
        groups,
        settings.learning_rate,
        settings.momentum,
        settings.betas,
        settings.epsilon,
        torch.bfloat16 if precision == "bf16" else torch.float32,
    )
