"""Norms of gradients and weights, to be summed in fp64."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Compute the sum of all elements' squares: fp64, (), on a GPU if one of the tensors is there.

    FSDP's CPU offload leaves on the GPU what it does not shard.
    """
    by_device = {device: [*group] for device, group in groupby(sorted(tensors, key=_device), key=_device)}
    sums = [norms(group).square().sum() for group in by_device.values()]
    return torch.stack([part.to(sums[-1].device) for part in sums]).sum()


def _device(tensor: Tensor) -> str:
    return str(tensor.device)  # "cpu" before "cuda:0"


def norms(tensors: list[Tensor]) -> Tensor:
    """Compute the L2 norm of each tensor, all on one device: fp64, (len(tensors),)."""
    if tensors[0].is_cpu:
        # torch.nn.utils.clip_grad_norm_ sums a large tensor's squares in fp32: 6e-5 off for a 2 M parameter Llama,
        # where DeepSpeed, which sums in fp64, was not
        return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
    # in fp32, because a GPU's kernel adds up partial sums, and fp64 would first copy every tensor
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).double()
