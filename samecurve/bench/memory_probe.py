"""One process of `bench memory`: measures its memory after each step of a run's start, and writes it to a file.

python -m samecurve.launch.ranks N -m samecurve.bench.memory_probe LIBRARY FOLDER
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

from samecurve.bench.collective_calls import COLLECTIVES, Buffers, is_unsupported
from samecurve.distributed import network
from samecurve.errors import ConfigurationError
from samecurve.planner.calibrate import COMMUNICATORS
from samecurve.specs.gpus import GIB

CONTEXT, KERNELS = "CUDA context", "first products and attention"
CALLS = ("all_reduce", "all_gather", "reduce_scatter")
# NCCL connects when a size first needs another algorithm
SIZES = {"cuda": (2**10, 2**26), "cpu": (2**10,)}
# A context without kernels has about half a GiB; more than this is another process's.
BUSY_GIB = 1.5
OF_A_RUN = ("samecurve.training.startup",)  # imports transformers, accelerate, and what every strategy needs
ENGINES = {"torch": "samecurve.accelerator.fsdp", "deepspeed": "samecurve.engines.zero"}


def main(library: str, folder: Path) -> int:
    rank, local, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        steps, held = on_gpu(device, world), lambda: gpu_bytes(device)
    else:
        steps, held = on_cpu(library), resident_bytes
    try:
        result = {"parts_gib": added(steps, held)}
    except ConfigurationError as error:
        result = {"problem": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if "parts_gib" in result else ConfigurationError.exit_code


def added(steps: Iterable[str], held: Callable[[], int]) -> dict[str, float]:
    """Return the GiB that each step adds. steps: yields a step's name after it. held: returns bytes."""
    parts, before = {}, 0
    for name in steps:
        now = held()
        parts[name], before = (now - before) / GIB, now
    return parts


def resident_bytes() -> int:
    """Return this process's resident memory. /proc exists on Linux alone, as does this command without GPUs."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes(device: torch.device) -> int:
    """Return what is used of a GPU, by any process, without what torch's allocator has reserved in this one.

    cuBLAS's workspaces are in torch's allocator, and NCCL's buffers are not.
    """
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def check_idle(device: torch.device) -> None:
    """Raise ConfigurationError if a GPU on which nothing has been computed yet has more than a context."""
    used = gpu_bytes(device) / GIB
    if used > BUSY_GIB:
        text = f"holds {used:.2f} GiB before anything is computed, but a context has less than {BUSY_GIB}"
        raise ConfigurationError(f"bench memory: GPU {device.index} {text}; stop the other processes on it")


def on_gpu(device: torch.device, world: int) -> Iterator[str]:
    """Go through the steps on a GPU."""
    torch.cuda.set_device(device)
    check_idle(device)
    yield CONTEXT
    train_step(device)
    yield KERNELS
    if world > 1:
        connect("nccl", device)
        yield COMMUNICATORS


def on_cpu(library: str) -> Iterator[str]:
    """Go through the steps on a CPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as in accelerator/cpu_bridge.py, before anything imports DeepSpeed
    yield "Python, torch"
    for name in OF_A_RUN:
        importlib.import_module(name)
    yield "transformers, accelerate, a run's own modules"
    importlib.import_module(ENGINES[library])
    yield "the engine's modules"
    device = torch.device("cpu")
    connect("gloo", device)
    yield "gloo"
    train_step(device, library)
    yield "a first step"


def connect(backend: str, device: torch.device) -> None:
    """Create the default process group and make its first collectives; those that a backend lacks are left out."""
    network.choose_interface()
    dist.init_process_group(backend, init_method=network.rendezvous())
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    for name in CALLS:
        for size in SIZES[device.type]:
            try:
                COLLECTIVES[name].run(Buffers(size, device))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if not is_unsupported(error):
                    raise


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1, vocab_size=256
    )
    return LlamaForCausalLM(sizes)


def train_step(device: torch.device, library: str = "") -> None:
    """Train a tiny Llama for one step, in bf16 on a GPU. library: its engine; "": none."""
    model = tiny_llama().to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    tokens = torch.zeros(1, 128, dtype=torch.long, device=device)
    if library == "deepspeed":
        # train one step under ZeRO-2, with small buckets, which the planner counts among the tensors
        import deepspeed

        importlib.import_module("samecurve.accelerator.cpu_bridge").leave_out_shared_memory()
        small = {"reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, **small}}
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        engine.backward(engine(input_ids=tokens).logits.sum())
        engine.step()
        return
    if library:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=tokens).logits.sum().backward()
    optimizer.step()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
