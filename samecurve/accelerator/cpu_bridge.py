"""The CPU bridge: the real strategies over gloo on machines without an accelerator.

By default, Accelerate on a CPU silently turns FSDP into separate single-process runs and ignores fp16. The workarounds
touch private state of Accelerate 1.15 and DeepSpeed 0.19, so all of them are in this file, and `check` verifies the
result.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from samecurve.distributed import network
from samecurve.distributed.control_group import TIMEOUT
from samecurve.errors import TopologyError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from samecurve.strategy.plan import Strategy


def needed() -> bool:
    """Whether this process has no GPU and trains on the CPU."""
    return not torch.cuda.is_available()


def backend(strategy: Strategy) -> str | None:
    """Backend of the process group; None leaves the choice to Accelerate."""
    return "gloo" if (needed() or gpus_are_shared()) and strategy.distributed else None


def prepare(distributed: bool, sharded: bool, deepspeed: bool) -> None:
    """Set up gloo and the distributed type that Accelerate expects. Call before Accelerate's `Accelerator(...)`.

    Args:
        distributed: a launcher has started this process, possibly alone.
        sharded: under FSDP2.
        deepspeed: under DeepSpeed.
    """
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")  # otherwise Apple's GPU, which lacks float64
    os.environ.pop("ACCELERATE_CPU_AFFINITY", None)  # binds to a GPU's NUMA node; Accelerate 1.15 fails without a GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns on every rank that it found no GPU
    if deepspeed:
        leave_out_shared_memory()
    elif distributed:
        PartialState(backend="gloo", init_method=network.rendezvous(), timeout=TIMEOUT)
        # Accelerate 1.15 turns MULTI_GPU into FSDP, but never MULTI_CPU (AcceleratorState)
        kind = DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU
        PartialState._shared_state["distributed_type"] = kind


def leave_out_shared_memory() -> None:
    """Disable DeepSpeed's all-reduce over shared memory; gloo does the same.

    DeepSpeed compiles the all-reduce at its first start on a CPU, which takes minutes and needs a C++ compiler. The
    all-reduce also mistakes two containers that share /dev/shm for one machine.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def adjust(accelerator: Accelerator, precision: str) -> None:
    """Enable fp16 autocast, which Accelerate disables on a CPU to train in fp32. Call after `Accelerator(...)`."""
    if precision == "fp16" and accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        accelerator.native_amp = True


def check(accelerator: Accelerator, strategy: Strategy) -> None:
    """Raise TopologyError if Accelerate set up a distributed type or backend other than the strategy's."""
    expected = DistributedType.FSDP if strategy.shards_model else DistributedType.MULTI_CPU
    if strategy.deepspeed is not None:
        expected = DistributedType.DEEPSPEED
    expected, actual = expected if strategy.distributed else DistributedType.NO, accelerator.distributed_type
    backend = dist.get_backend() if dist.is_initialized() else None
    if actual != expected or (backend != "gloo" and strategy.distributed):
        raise TopologyError(
            f"strategy {strategy.name}: on a CPU this version of Accelerate made {actual} over {backend} of it, "
            f"not {expected} over gloo; use the version in constraints.txt"
        )


SHARE_GPUS = "SAMECURVE_SHARE_GPUS"


def gpus_are_shared() -> bool:
    """Whether several processes share a GPU over gloo, so that its kernels can be tested under strategies of ranks.

    NCCL refuses two ranks on one device. gloo copies through host memory, so this is slow, and it has no point-to-point
    transfers of device memory: pipelines need a GPU for each stage. This has not run on a GPU yet.
    """
    return SHARE_GPUS in os.environ and torch.cuda.is_available()


def share_gpus() -> None:
    """Number the local ranks by GPU, as Accelerate, DeepSpeed and DeviceMesh read LOCAL_RANK to choose a device.

    Raises:
        TopologyError: this process has no GPU of its own, and none are shared.
    """
    if needed():
        return
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpus_are_shared():
        os.environ["LOCAL_RANK"] = str(rank % count)
    elif rank >= count:
        raise TopologyError(
            f"LOCAL_RANK: {rank}, but this process sees {count} of the host's GPUs; start at most {count} processes on "
            "it. Where SLURM gives each task one GPU that it alone sees, start with --gpus-per-node or "
            "--gpu-bind=none instead of --gpus-per-task, --gpu-bind=single"
        )


# torch.nn.SyncBatchNorm on CPUs, where PyTorch has no kernel for it and DDP refuses it.


def install_sync_batch_norm(model: nn.Module, device: torch.device) -> None:
    """Let the SyncBatchNorm layers of a model on a CPU normalize over all processes; on other devices PyTorch does.

    A process without rows of its own counts its copy of another's row, see GlobalBatches, as it does on GPUs.
    """
    if device.type != "cpu" or not dist.is_initialized():
        return
    for part in model.modules():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = SyncBatchNorm  # pyright: ignore[reportAttributeAccessIssue]


class SyncBatchNorm(_BatchNorm):
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
