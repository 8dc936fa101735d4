"""Second opinion on the memory of a plan: the real model under the real strategy, on fake tensors of one of N ranks.

torch's fake process group stands for the other ranks, and its MemTracker counts (torch 2.13; both are private). Layers
are alike, so that models of 2 and 4 layers are tracked and the others extrapolated.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from samecurve.engines import accelerator, context_parallel, fsdp, launch_env, tensor_parallel
from samecurve.engines.loss_implementation import install_loss
from samecurve.engines.mesh import Mesh
from samecurve.errors import ConfigurationError
from samecurve.losses.chunked_cross_entropy import TokenSums
from samecurve.losses.cross_entropy import token_loss_sum
from samecurve.models import bf16_copies
from samecurve.models.activation_checkpointing import checkpoint_layers
from samecurve.models.attention import varlen
from samecurve.models.hf_config import model_config
from samecurve.models.lora import trained_shapes
from samecurve.models.skeleton import construct
from samecurve.optim import factory
from samecurve.planner import memory
from samecurve.planner.hardware import GIB
from samecurve.planner.job import Job
from samecurve.planner.printing import table
from samecurve.specs.precision import compute_dtype
from samecurve.strategy.plan import Plan

CPU = torch.device("cpu")  # a CPU build aborts at the first matmul of fake CUDA tensors
DEPTHS = (2, 4)
SHOWN = 0.05  # differences above this share are pointed out
STATES = ("weights", "gradients", "accumulators", "master weights", "optimizer")


@dataclass(frozen=True)
class Tracked:
    """Bytes of a rank at the peak of a step, and what of them are sharded states."""

    peak: float
    states: float
    activations: float


def run(plan: Plan, job: Job, rank: int = 0) -> int:
    """Track one rank of a plan and print its memory beside that of the formulas.

    Args:
        plan: with the micro-batch size and recomputation of `job`.
        job: of the formulas.
        rank: of the fake world.

    Raises:
        ConfigurationError: the strategy's engine cannot run on fake tensors.
    """
    family = plan.strategy.family
    if family in ("zero", "pipeline"):
        raise ConfigurationError(f"--dry-run: DeepSpeed ({plan.strategy.name}) has buffers that the tracker cannot see")
    if family == "schedule" or plan.strategy.dims.ep > 1:
        raise ConfigurationError(
            f"--dry-run: {plan.strategy.name} waits for what other ranks send, and fake ones send none"
        )
    warnings.filterwarnings("ignore", "Slicing a flattened dim", UserWarning)  # of HSDP's mesh (torch 2.13)
    layers, began = job.shape.layers, time.perf_counter()
    depths = " and ".join(map(str, DEPTHS))
    print(f"\ndry run: rank {rank} of {job.layout.gpus:,}, {depths} of {layers} layers", flush=True)
    meshes = _real_meshes() if family == "fsdp" and plan.strategy.tensor_parallel_size > 1 else nullcontext()
    try:
        with meshes:
            few, more = (_track(plan, job, depth, rank) for depth in DEPTHS)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        text = (
            f"--dry-run: {plan.strategy.name} needs the values of tensors ({error.func}), which fake ones do not have"
        )
        raise ConfigurationError(text) from None
    print(_compare(job, few, more))
    if family == "ddp":
        print("Tracked as one process, without DDP, whose gradients are views of its buckets.")
    print(f"{time.perf_counter() - began:.0f} s")
    return 0


def _compare(job: Job, few: Tracked, more: Tracked) -> str:
    # tracked on a CPU, where the loss has smaller chunks
    first = memory.anatomy(replace(job, card=replace(job.card, generation="cpu")))[0]
    lines = {line.name: line for line in first.lines}
    held = sum(lines[name].optimizer for name in STATES)
    of_layer = (lines["activations"].forward + lines["gathered inputs"].forward) / job.shape.layers
    if job.flow in ("copies", "autocast"):  # the tracker counts the copies of the layer's weights, too
        of_layer += lines["16-bit weights"].forward * job.shape.layer_parameters / job.shape.parameters

    def whole(name: str) -> float:
        start, end = getattr(few, name), getattr(more, name)
        return start + (job.shape.layers - DEPTHS[0]) * (end - start) / (DEPTHS[1] - DEPTHS[0])

    rows = [("GiB", "formulas", "tracked", "")]
    values = {
        "weights, gradients, optimizer": (held, whole("states")),
        "activations of a layer": (of_layer, (more.activations - few.activations) / (DEPTHS[1] - DEPTHS[0])),
        "peak of all tensors": (first.peak - lines["workspaces"].forward, whole("peak")),  # a CPU has no cuBLAS
    }
    for name, (predicted, tracked) in values.items():
        error = predicted / tracked - 1 if tracked > 0 else 0.0
        note = f"differs by {error:+.0%}" if abs(error) > SHOWN else ""
        rows.append((name, f"{predicted / GIB:.3f}", f"{tracked / GIB:.3f}", note))
    return table(rows)


def _track(plan: Plan, job: Job, depth: int, rank: int) -> Tracked:
    """Train two steps of a model of `depth` layers on fake tensors; the second one is tracked."""
    with _world(job.layout.gpus, rank):
        mesh = Mesh(plan.strategy.dims, rank, CPU)
        sharding = mesh.sharding if plan.strategy.family == "fsdp" else None  # a mesh cannot be made of fake tensors
        assert sharding is None or mesh.devices is not None
        if plan.strategy.tensor_parallel_size > 1:
            mesh.devices["tp"].get_group()
        # outside FakeTensorMode, in which building takes minutes and casting fails (torch 2.13)
        skeleton = _meta(plan, job, depth)
        if plan.strategy.dims.cp > 1:
            model = context_parallel.build(skeleton, plan.recipe, plan.strategy, mesh)
        else:
            model = _meta(plan, job, depth)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, optimizer = _apply(plan, model, skeleton, mesh)
            batch = _Batch.of(job)
            # Untracked: the first step propagates DTensors' shapes on tensors of full size, which would be counted.
            _step(plan, job, model, optimizer, batch, None)
            tracker = MemTracker()
            tracker.track_external(model, optimizer, batch.tokens, batch.positions)
            with tracker:
                states = _step(plan, job, model, optimizer, batch, tracker)
            peak = _snapshot(tracker, "peak")
    return Tracked(peak["Total"], states, peak["_MemRefType.ACT"])


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Join meshes outside FakeTensorMode: FSDP joins its own with tensor parallelism's, and needs the ranks in them."""
    join = DeviceMesh._concatenate

    def real(*arguments: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return join(*arguments)

    DeviceMesh._concatenate = staticmethod(real)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(join)


@contextmanager
def _world(size: int, rank: int) -> Iterator[None]:
    """Pretend to be one of `size` processes whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meta(plan: Plan, job: Job, depth: int) -> Any:
    config = model_config(plan.recipe, job.shape.vocab)
    config.num_hidden_layers = depth
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:depth]
    if job.masked and config._attn_implementation == varlen.NAME:  # which `auto` selects here, and a GPU does not
        config._attn_implementation = "sdpa"
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping[type(config)]
    return construct(cast(Any, kind), config, torch.device("meta"))


def _apply(plan: Plan, model: Any, skeleton: Any, mesh: Mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Change and shard the model as TorchEngine does, without compilation and other kernels."""
    recipe, strategy = plan.recipe, plan.strategy
    settings, shapes = recipe.optimizer, trained_shapes(skeleton)
    model = factory.cast_weights(model, settings)
    if strategy.tensor_parallel_size > 1:
        tensor_parallel.apply(model, mesh, strategy.tp_sequence_parallel)
    if strategy.family != "fsdp":
        tensor_parallel.allocate(model, CPU)
    copies = accelerator.computes_in_copies(plan)
    if copies:
        bf16_copies.install_in_layers(model)
    checkpoint_layers(model, recipe.memory)
    install_loss(model, skeleton, cast(Any, SimpleNamespace(by_token=True, by_log_probability=False)), recipe, CPU)
    if strategy.family == "fsdp":
        launch_env.export_launch_env(strategy)
        state = SimpleNamespace(fsdp_plugin=accelerator.plugins(plan)["fsdp_plugin"])
        model = fsdp.shard(cast(Any, SimpleNamespace(state=state, device=CPU)), model, mesh)
    elif copies:
        bf16_copies.install_around(model)
    groups = factory.parameter_groups(
        model.named_parameters(), shapes, settings, factory.hidden_matrices(skeleton, shapes)
    )
    if strategy.tensor_parallel_size > 1:
        groups = tensor_parallel.groups_by_mesh(groups)
    return model, factory.build_optimizer(groups, settings, recipe.precision, recipe.seed)


@dataclass(frozen=True)
class _Batch:
    tokens: Tensor
    positions: Tensor

    @classmethod
    def of(cls, job: Job) -> _Batch:
        # under context parallelism, angles and masks are made of whole rows' positions
        own = torch.zeros((job.micro_batch, job.seq // job.layout.cp), dtype=torch.long)
        return cls(own, torch.arange(job.seq).expand(job.micro_batch, job.seq))


def _step(
    plan: Plan, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batch: _Batch, tracker: MemTracker | None
) -> float:
    """Train a step of at most two micro-batches. Returns the bytes of states with all gradients, 0 untracked."""
    held = 0.0
    casts = plan.strategy.family == "fsdp" or accelerator.computes_in_copies(plan)
    autocast = not casts and plan.recipe.precision != "fp32"
    context = torch.autocast("cpu", compute_dtype(plan.recipe.precision)) if autocast else nullcontext()
    for _ in range(min(job.grad_accum, 2)):
        if tracker:
            tracker.reset_mod_stats()  # else it refuses a second forward pass of the model
        with context:
            inputs = {"input_ids": batch.tokens, "position_ids": batch.positions}
            if plan.recipe.loss.implementation == "full" or plan.recipe.precision == "fp16":
                logits = model(**inputs).logits
                loss = token_loss_sum(logits, batch.tokens)
            else:
                loss = model(**inputs, sums=TokenSums(token_loss_sum, {"labels": batch.tokens}, None))
        loss.backward()
        del loss
        held = _snapshot(tracker, "current")["Total"] if tracker else 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return held


def _snapshot(tracker: MemTracker, kind: str) -> dict[str, float]:
    """Return the bytes by kind of tensor, all devices of the fake rank together being its CPU."""
    return {str(key): float(value) for key, value in tracker.get_tracker_snapshot(kind)[CPU].items()}
