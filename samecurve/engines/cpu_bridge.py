"""The CPU bridge: the real strategies over gloo where there is no accelerator.

Left alone, Accelerate on a CPU turns FSDP into separate single-process runs and ignores fp16, without a word. What is
done about it touches private state of Accelerate 1.15 and DeepSpeed 0.19, so all of it is here, and `check` asserts
what came out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from samecurve.errors import TopologyError

if TYPE_CHECKING:
    from accelerate import Accelerator

    from samecurve.strategy.plan import Strategy

_KINDS = {"ddp": DistributedType.MULTI_CPU, "fsdp": DistributedType.MULTI_GPU}
_EXPECTED = {
    "single": DistributedType.NO,
    "ddp": DistributedType.MULTI_CPU,
    "fsdp": DistributedType.FSDP,
    "zero": DistributedType.DEEPSPEED,
    "pipeline": DistributedType.DEEPSPEED,
}


def needed() -> bool:
    """Whether this process has no accelerator and rehearses on the CPU."""
    return not torch.cuda.is_available()


def backend(strategy: Strategy) -> str | None:
    """The process group's backend; None leaves it to Accelerate."""
    return "gloo" if needed() and strategy.family != "single" else None


def prepare(strategy: Strategy) -> None:
    """Before `Accelerator(...)`: gloo processes of the kind that Accelerate builds the strategy on."""
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")  # else Apple's GPU, which lacks float64
    os.environ.pop("ACCELERATE_CPU_AFFINITY", None)  # binds to a GPU's node; without one Accelerate 1.15 fails in it
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns on every rank that it found nothing better
    if strategy.deepspeed is not None:
        _leave_out_shared_memory()
    if strategy.family in _KINDS:
        PartialState(backend="gloo")
        PartialState._shared_state["distributed_type"] = _KINDS[strategy.family]


def _leave_out_shared_memory() -> None:
    """DeepSpeed compiles an all-reduce over shared memory at its first start on a CPU: minutes, and a C++ compiler, for
    nothing that gloo does not do. It also takes two containers that share /dev/shm for one machine."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def adjust(accelerator: Accelerator, precision: str) -> None:
    """After `Accelerator(...)`: fp16 autocast, which Accelerate leaves off on a CPU and trains in fp32 instead."""
    if precision == "fp16" and accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        accelerator.native_amp = True


def check(accelerator: Accelerator, strategy: Strategy) -> None:
    """Raises TopologyError when Accelerate made something else of the bridge than the strategy."""
    expected, found = _EXPECTED[strategy.family], accelerator.distributed_type
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    if found != expected or (backend != "gloo" and strategy.family != "single"):
        raise TopologyError(
            f"strategy {strategy.name}: on a CPU this version of Accelerate made {found} over {backend} of it, "
            f"not {expected} over gloo; use the version in constraints.txt"
        )
