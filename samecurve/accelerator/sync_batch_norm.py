"""torch.nn.SyncBatchNorm on CPUs, where PyTorch has no kernel for it."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional


def install(model: nn.Module, device: torch.device) -> None:
    """Let the SyncBatchNorm layers of a model on a CPU normalize over all processes; on other devices PyTorch does."""
    if device.type != "cpu" or not dist.is_initialized():
        return
    for part in model.modules():
        if isinstance(part, nn.SyncBatchNorm):
            part.forward = partial(_forward, part)  # pyright: ignore[reportAttributeAccessIssue]


def _forward(layer: nn.SyncBatchNorm, values: Tensor) -> Tensor:
    """Normalize `values` of shape (rows, channels, ...) as torch.nn.BatchNorm does over the rows of all processes."""
    if not layer.training:
        means, variances, weight, bias = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return functional.batch_norm(values, means, variances, weight, bias, False, 0.0, layer.eps)
    axes = [0, *range(2, values.dim())]
    count = values.new_full((1,), values.numel() / values.shape[1])
    sums = all_reduce(torch.cat([values.sum(axes), count]), group=layer.process_group or dist.group.WORLD)
    mean, count = sums[:-1] / sums[-1], sums[-1].detach()
    shape = (1, -1, *[1] * (values.dim() - 2))
    centred = values - mean.view(shape)
    # a second sum, because E[x^2] - E[x]^2 cancels
    squares = all_reduce((centred * centred).sum(axes), group=layer.process_group or dist.group.WORLD)
    variance = squares / count
    if layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None:
        with torch.no_grad():
            layer.num_batches_tracked.add_(1)
            momentum = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean, momentum)
            layer.running_var.lerp_(variance * (count / (count - 1)), momentum)  # unbiased, as BatchNorm's is
    result = centred * torch.rsqrt(variance + layer.eps).view(shape)
    return result * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else result
