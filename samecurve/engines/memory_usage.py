"""Memory of a rank between two steps by purpose, measured on the live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from samecurve.engines.momentum_encoder import MomentumEncoder
from samecurve.interfaces.engine import EngineDescription, MemoryUsage
from samecurve.models import quantized


def memory_usage(
    module: nn.Module, optimizer: object, described: EngineDescription, encoder: MomentumEncoder | None = None
) -> MemoryUsage:
    """Measure the bytes of weights, optimizer state and gradients that this rank holds between two steps.

    Those of a momentum encoder, which follows the optimizer's updates, count as optimizer state.
    """
    weights = list(_storages([*module.parameters(), *module.buffers(), *quantized.scales(module)]))
    chain: list[Any] = [optimizer]
    while hasattr(chain[-1], "optimizer"):  # Accelerate's and DeepSpeed's wrappers, which share no base class
        chain.append(chain[-1].optimizer)
    own = {storage.data_ptr() for storage in weights}
    kept = [parameter for group in chain[-1].param_groups for parameter in group["params"]]
    for parameter, state in chain[-1].state.items():
        kept.append(parameter)  # ZeRO-3 has its fp32 masters in a parameter group only during their update
        kept += [value for value in state.values() if isinstance(value, Tensor)]
    if described.whole_gradient_bytes:
        gradients = described.whole_gradient_bytes
    elif described.zero_stage >= 2:
        gradients = -(-described.num_trained_parameters // described.dims.dp) * torch.float32.itemsize
    else:
        trained = [_local(parameter) for parameter in module.parameters() if parameter.requires_grad]
        by_deepspeed = described.zero_stage or described.dims.pp > 1
        gradients = sum(
            weight.numel() * (torch.float32.itemsize if by_deepspeed else weight.element_size()) for weight in trained
        )
    return MemoryUsage(
        weights=sum(storage.nbytes() for storage in weights),
        optimizer=sum(storage.nbytes() for storage in _storages(kept) if storage.data_ptr() not in own)
        + (encoder.num_bytes if encoder else 0),
        gradients=gradients,
        gradients_between_steps=min(gradients, _kept_gradients(module, chain, gradients)),
    )


def _kept_gradients(module: nn.Module, optimizers: list[Any], gradients: int) -> int:
    """Bytes of gradients that stay allocated between steps."""
    if isinstance(module, DistributedDataParallel):
        return gradients  # DDP keeps its buckets, and the gradients are views of them (gradient_as_bucket_view)
    kept = [parameter.grad for parameter in module.parameters()]
    # offloaded optimizers keep the gradients of their update
    kept += [parameter.grad for group in optimizers[-1].param_groups for parameter in group["params"]]
    for optimizer in optimizers:
        # flat buffers of ZeRO-3 and of DeepSpeed's bf16 optimizer under a pipeline
        kept.append(getattr(optimizer, "grad_partitions_flat_buffer", None))
        kept += getattr(optimizer, "fp32_groups_gradients_flat", None) or []
    return sum(storage.nbytes() for storage in _storages(tensor for tensor in kept if tensor is not None))


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yield each storage once; tensors may be views of one buffer."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = _local(tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of an FSDP or ZeRO-3 parameter; other tensors unchanged."""
    tensor = getattr(tensor, "ds_tensor", tensor)
    tensor = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
