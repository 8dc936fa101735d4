"""The norm of a gradient, summed in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def norms(tensors: list[Tensor]) -> Tensor:
    """fp64 (len(tensors),): the L2 norm of each.

    torch.nn.utils.clip_grad_norm_ sums a large tensor's squares in fp32 on a CPU: 6e-5 off where DeepSpeed, which
    sums in fp64, was not (seen with a 2 M parameter Llama). A GPU adds up partial sums, and would first make an fp64
    copy of every tensor.
    """
    if tensors[0].is_cpu:
        return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).double()
