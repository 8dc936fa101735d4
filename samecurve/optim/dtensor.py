"""Weights and gradients that FSDP2 shards: this rank's shards, their sums and norms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_numel(tensors: Iterable[Tensor]) -> int:
    """Count the values that this rank holds of some tensors."""
    return sum(to_local(tensor).numel() for tensor in tensors)


def local_gradient(weight: Tensor) -> Tensor:
    """Return this rank's shard of the weight's gradient."""
    assert weight.grad is not None  # optimizers skip weights without a gradient
    return to_local(weight.grad)


def shards_of(tensor: Tensor) -> ProcessGroup | None:
    """Return the group of ranks whose shards make up the tensor; None if this rank has all of the tensor."""
    if not isinstance(tensor, DTensor):
        return None
    sharded = [i for i, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    # its caller, Adafactor, is refused under tensor and expert parallelism, which also cut other dimensions
    assert all(tensor.placements[i] == Shard(0) for i in sharded) and len(sharded) <= 1, tensor.placements
    return tensor.device_mesh.get_group(sharded[0]) if sharded else None


def all_reduce_sums(tensors: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Sum each tensor of a list of one dtype over the group, with a single all-reduce. Without a group: unchanged."""
    if group is None or not tensors:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    torch.distributed.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def first_index(tensor: Tensor) -> int:
    """Return the index in the flattened full tensor at which this rank's shard begins.

    Only for shards along dimension 0; the strategies refuse adamw_bf16, the only user, where others are cut.
    """
    if not isinstance(tensor, DTensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * (tensor.numel() // max(tensor.shape[0], 1))


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Compute the sum of all elements' squares: fp64, (), on a GPU if one of the tensors is there.

    FSDP's CPU offload leaves on the GPU what it does not shard.
    """
    devices = sorted({tensor.device for tensor in tensors}, key=str)  # "cpu" before "cuda:0"
    sums = [norms([tensor for tensor in tensors if tensor.device == device]).square().sum() for device in devices]
    return torch.stack([part.to(devices[-1]) for part in sums]).sum()


def norms(tensors: list[Tensor]) -> Tensor:
    """Compute the L2 norm of each tensor, all on one device: fp64, (len(tensors),)."""
    if tensors[0].is_cpu:
        # torch.nn.utils.clip_grad_norm_ sums a large tensor's squares in fp32: 6e-5 off for a 2 M parameter Llama,
        # where DeepSpeed, which sums in fp64, was not
        return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
    # in fp32, because a GPU's kernel adds up partial sums, and fp64 would first copy every tensor
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).double()
