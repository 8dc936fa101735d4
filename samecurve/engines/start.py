"""Creation of the Accelerator, identical under every launcher."""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import (
    AutocastKwargs,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    set_seed,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from samecurve.accelerator import cpu_bridge, launch_env
from samecurve.accelerator.accelerator import Accelerator
from samecurve.distributed import control_group, flight_recorder, network
from samecurve.distributed.affinity import bind_to_gpu, share_of_cores
from samecurve.errors import TopologyError
from samecurve.models import fp8, liger
from samecurve.models.attention import cudnn
from samecurve.specs.precision import compute_dtype, torch_dtype
from samecurve.strategy.plan import resolve_auto

if TYPE_CHECKING:
    from samecurve.strategy.plan import Plan


def build_accelerator(plan: Plan) -> Accelerator:
    """Create the Accelerator that the plan's strategy needs.

    Raises:
        TopologyError: Accelerate's world size or distributed type differs from the plan's, or as choose_interface.
        ConfigurationError: the device does not support the recipe's fp8 or Liger kernels.
    """
    strategy, recipe = plan.strategy, plan.recipe
    _prepare_environment(plan)
    quote_path()
    if cpu_bridge.needed():
        keep_freed_memory()
        cpu_bridge.prepare(strategy.distributed, strategy.shards_model, strategy.deepspeed is not None)
    if cpu_bridge.needed() or strategy.offloads_optimizer:
        torch.set_num_threads(num_threads())
    accelerator = Accelerator(
        dims=strategy.dims,
        mixed_precision="no" if recipe.precision == "fp32" else recipe.precision,
        # engines set the number of steps
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[
            InitProcessGroupKwargs(
                backend=cpu_bridge.backend(strategy),
                init_method=network.rendezvous() if strategy.distributed else None,
                timeout=control_group.TIMEOUT,
            ),
            AutocastKwargs(enabled=not computes_in_copies(plan)),
            # Buffers are the same on every rank (models/weights.py), and broadcasting them would be a collective before
            # each forward pass. Without views of its buckets DDP would store each gradient twice.
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
        log_with=[*recipe.logging.trackers] or None,
        project_config=ProjectConfiguration(project_dir=recipe.output_dir, logging_dir=recipe.output_dir),
        **plugins(plan),
    )
    if accelerator.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(accelerator.device)
        bind_to_gpu(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")
    set_seed(recipe.seed, device_specific=True)  # not read by initial weights, row order or dropout masks
    accelerator.scaler = None  # fp16's loss scale goes by the global norm, see LossScale
    if cpu_bridge.needed():
        cpu_bridge.adjust(accelerator, recipe.precision)
        cpu_bridge.check(accelerator, strategy)
    if accelerator.num_processes != strategy.world_size:
        raise TopologyError(
            f"{strategy.world_size} processes were asked for, but Accelerate made a world of "
            f"{accelerator.num_processes} ({accelerator.distributed_type}): start them with accelerate "
            "launch, torchrun or deepspeed"
        )
    fp8.check_device(recipe.fp8, accelerator.device)
    liger.check_device(recipe, accelerator.device)
    chunks = 2 * strategy.dims.cp if strategy.context_parallel == "allgather" else 0
    cudnn.configure(recipe, accelerator.device, chunks=chunks)
    return accelerator


def computes_in_copies(plan: Plan) -> bool:
    """Whether whole weights are cast to bf16 layer by layer, as FSDP's shards are, instead of by autocast."""
    return plan.recipe.precision == "bf16" and plan.strategy.keeps_model


def _prepare_environment(plan: Plan) -> None:
    """Prepare what the process groups depend on, and after a restart by torchrun create the first one."""
    strategy = plan.strategy
    if not strategy.distributed:
        launch_env.export_launch_env(strategy)
        return
    control_group.lengthen_default_timeouts()
    if plan.recipe.profile.steps is not None:
        flight_recorder.enable()
    launch_env.export_launch_env(strategy)
    network.choose_interface()
    cpu_bridge.share_gpus()
    launch_env.rejoin_after_restart(cpu_bridge.backend(strategy), control_group.TIMEOUT)


def num_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Number of CPU threads: the user's OMP_NUM_THREADS, or this process's share of the cores.

    torchrun sets OMP_NUM_THREADS to 1 if the user has not set it; one thread is too slow for Adam's update on the CPU.
    """
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0]  # further numbers are for nested parallel regions
    of_torchrun = given == "1" and "TORCHELASTIC_RUN_ID" in environ
    if given.isdecimal() and int(given) > 0 and not of_torchrun:
        return int(given)
    return share_of_cores(int(environ.get("LOCAL_WORLD_SIZE", "1")))


def plugins(plan: Plan) -> dict:
    """Build Accelerate's plugin of the strategy, if it has one, from the environment of `accelerate launch`."""
    strategy = plan.strategy
    if strategy.backend == "deepspeed":
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=resolve_auto(plan))}
    if not strategy.shards_model:
        return {}
    # Accelerate's own policy would reduce gradients in bf16. Outputs keep their dtype: the loss is computed in fp32
    # from the logits (cross_entropy.py), and one output dtype for all layers would pass fp32 activations to bf16
    # weights during recomputation.
    reduce_dtype = torch_dtype(strategy.fsdp_reduce_dtype)
    # Inputs keep theirs, too, as in one process: fp32 residuals, rotary angles of some families, weights of tokens.
    dtype = compute_dtype(plan.recipe.precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    # set after construction: Accelerate 1.15 rejects the option for FSDP2 in the constructor; fsdp.py implements it
    plugin.forward_prefetch = strategy.fsdp_forward_prefetch
    return {"fsdp_plugin": plugin}


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_TRIM_BYTES = 2**31 - 1  # the maximum of a C int
# Larger blocks are still returned to the kernel: keeping them fragments the heap, because the gaps between them are too
# small for blocks of their size. glibc before 2.35 accepts at most 2 ** 25 (HEAP_MAX_SIZE / 2 in its malloc.c).
_KEPT_BYTES = 2**26, 2**25


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Make glibc keep the memory that a step frees for the next step.

    By default glibc returns large blocks to the kernel, which hands them out again page by page and clears each page:
    31,600 page faults in a step of benchmarks/speed/pretrain.yaml, of which 1,700 are left. Other C libraries have no
    such call. Malloc settings of the user take precedence.

    Returns:
        Whether the setting is in effect.
    """
    own = any(name.startswith("MALLOC_") for name in environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" and not own else None
    if mallopt is None or not any(mallopt(_MMAP_THRESHOLD, most) for most in _KEPT_BYTES):
        return False  # setting only the trim threshold would stop glibc from adapting its mmap threshold
    return bool(mallopt(_TRIM_THRESHOLD, _TRIM_BYTES))


def quote_path() -> None:
    """Let torch.compile on a CPU, and DeepSpeed's operators, be compiled where torch's path has a space.

    Both give this path to a shell's words, `-L{TORCH_LIB_PATH}`, without quotes (read in torch 2.13:
    utils/cpp_extension.py and _inductor/cpp_builder.py; the linker then finds no libtorch).
    """
    spec = find_spec("torch")
    assert spec and spec.origin
    path = str(Path(spec.origin).parent / "lib")
    if path != shlex.quote(path):
        from torch.utils import cpp_extension  # a tenth of a second

        cpp_extension.TORCH_LIB_PATH = shlex.quote(path)
