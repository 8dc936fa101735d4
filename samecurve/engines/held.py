"""How many bytes a rank holds between two steps, by what they are for, measured on the live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def held_bytes(module: nn.Module, optimizer: object, facts: dict) -> dict[str, int]:
    """This rank's part, wherever it lies (device or host; what lies on a disk is not counted).

    weights: with buffers. optimizer: moments, and the fp32 weights that it keeps beside those that compute. gradients:
    of the trained ones while there are any, by formula, because there are none between steps: fp32, whole on every
    rank unless facts (Engine.describe) say that they are sharded.
    """
    weights = list(_storages([*module.parameters(), *module.buffers()]))
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    own = {storage.data_ptr() for storage in weights}
    kept = _storages(_tensors_of(optimizer))
    return {
        "weights": sum(storage.nbytes() for storage in weights),
        "optimizer": sum(storage.nbytes() for storage in kept if storage.data_ptr() not in own),
        "gradients": _gradients(module, facts),
    }


def _gradients(module: nn.Module, facts: dict) -> int:
    size = torch.float32.itemsize
    if facts.get("whole_gradient_bytes"):
        return facts["whole_gradient_bytes"]
    if facts["zero_stage"] >= 2:
        return -(-facts["num_trained_parameters"] // facts["data_parallel_size"]) * size
    return sum(_local(each).numel() for each in module.parameters() if each.requires_grad) * size


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for parameter, state in optimizer.state.items():
        yield parameter  # ZeRO-3 puts its masters into a group only while they are updated
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Each storage once: tensors may be views of one buffer."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = _local(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _local(tensor: Tensor) -> Tensor:
    """The part that this rank keeps: of FSDP's and of ZeRO-3's parameters."""
    tensor = getattr(tensor, "ds_tensor", tensor)
    tensor = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
