"""torch.nn.SyncBatchNorm on CPUs, where PyTorch has no kernel for it and DDP refuses it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def install(model: nn.Module, device: torch.device) -> None:
    """Let the SyncBatchNorm layers of a model on a CPU normalize over all processes; on other devices PyTorch does.

    A process without rows of its own counts its copy of another's row, see GlobalBatches, as it does on GPUs.
    """
    if device.type != "cpu" or not dist.is_initialized():
        return
    for part in model.modules():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = _SyncBatchNorm  # pyright: ignore[reportAttributeAccessIssue]


class _SyncBatchNorm(_BatchNorm):
    """SyncBatchNorm over gloo; no subclass of torch's, of which DDP takes none on a CPU."""

    process_group: Any

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize values of shape (rows, channels, ...) as torch.nn.BatchNorm does over the rows of all processes."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        axes, group = [0, *range(2, input.dim())], self.process_group or dist.group.WORLD
        count = input.new_full((1,), input.numel() / input.shape[1])
        sums = all_reduce(torch.cat([input.sum(axes), count]), group)
        mean, count = sums[:-1] / sums[-1], sums[-1].detach()
        shape = (1, -1, *[1] * (input.dim() - 2))
        centred = input - mean.view(shape)
        # a second sum, because E[x^2] - E[x]^2 cancels
        variance = all_reduce((centred * centred).sum(axes), group) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(variance * (count / (count - 1)), momentum)  # unbiased, as BatchNorm's is
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        return result * self.weight.view(shape) + self.bias.view(shape) if self.affine else result


class _AllReduce(torch.autograd.Function):
    """Sum over the processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: Any) -> Tensor:
        context.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=context.group)
        return total, None


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """As torch.distributed.nn.functional's, which torch 2.13 deprecates for a private one."""
    return _AllReduce.apply(tensor, group)
