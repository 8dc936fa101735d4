"""One rank of N on fake tensors: torch's fake process group stands for the other ranks, and its MemTracker counts.

Both are private (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from samecurve.accelerator.mesh import Mesh
from samecurve.models.attention import varlen
from samecurve.models.hf_config import model_config
from samecurve.models.skeleton import construct
from samecurve.planner.job import Job
from samecurve.strategy.plan import Plan

CPU = torch.device("cpu")  # a CPU build aborts at the first matmul of fake CUDA tensors


@dataclass(frozen=True)
class Tracked:
    """Bytes of a rank at the peak of a step, and what of them are states and activations."""

    peak: float
    states: float
    activations: float


class StepTracker(MemTracker):
    """A MemTracker of a whole step, without the peak of each module, whose search takes a third of the time."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _Passes(self)

    def bytes_now(self) -> float:
        return _bytes(self, "current")["Total"]

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, held in self._curr_mem_snap.items():
            if held["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device], self._peak_mem_snap[device] = held["Total"], dict(held)


class _Passes(ModTracker):
    """Tells forward from backward passes, and counts gathered weights as weights.

    ModTracker itself has hooks on inputs, which torch 2.13 refuses in a backward pass in two halves.
    """

    def __init__(self, tracker: StepTracker):
        super().__init__()
        self._tracker = tracker

    def __enter__(self) -> _Passes:
        self._fw_pre_handle = register_module_forward_pre_hook(self._track)
        return self

    def __exit__(self, *_: Any) -> None:
        self._fw_pre_handle.remove()

    def _track(self, module: nn.Module, _: Any) -> None:
        for weight in module.parameters(recurse=False):
            self._tracker._update_and_maybe_create_winfos(weight, _MemRefType.PARAM)


class FakeRank(Protocol):
    """What a rank computes. Built outside of FakeTensorMode, where building takes minutes and casting fails."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def allocate(self) -> None:
        """Change and shard the model, allocate its weights and build the optimizer."""
        ...

    def inputs(self) -> Sequence[Tensor]:
        """Return the tensors that live before a step, beside states."""
        ...

    def step(self, tracker: StepTracker | None) -> float:
        """Train a step. Returns the bytes of states with all gradients, 0 untracked."""
        ...


def track(plan: Plan, job: Job, rank: int, build: Callable[[Mesh], FakeRank]) -> Tracked:
    """Train two steps of a rank on fake tensors; the second one is tracked."""
    with _real_meshes(), _single_products(), _world(job.dims.world_size, rank):
        fake = build(Mesh(plan.strategy.dims, rank, CPU))
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake.allocate()
            # Untracked: the first step propagates DTensors' shapes on tensors of full size, which would be counted.
            fake.step(None)
            tracker = StepTracker()
            tracker.track_external(fake.module, fake.optimizer, *fake.inputs())
            with tracker:
                states = fake.step(tracker)
    peak = _bytes(tracker, "peak")
    return Tracked(peak["Total"], states, peak["_MemRefType.ACT"])


def meta_model(plan: Plan, job: Job, layers: int) -> Any:
    """Build a model of some layers on the meta device."""
    config = model_config(plan.recipe, job.shape.vocab)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        kinds = config.layer_types
        config.layer_types = [kinds[index % len(kinds)] for index in range(layers)]
    if job.masked and config._attn_implementation == varlen.NAME:  # which `auto` selects here, and a GPU does not
        config._attn_implementation = "sdpa"
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping[type(config)]
    return construct(cast(Any, kind), config, torch.device("meta"))


def _bytes(tracker: MemTracker, kind: str) -> dict[str, float]:
    """Return the bytes by kind of tensor, all devices of the fake rank together being its CPU."""
    return {str(key): float(value) for key, value in tracker.get_tracker_snapshot(kind)[CPU].items()}


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Join meshes outside FakeTensorMode: FSDP joins its own with that of cut or spread weights."""
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
def _single_products() -> Iterator[None]:
    """Let experts compute their products one by one: torch knows the shapes of grouped ones in bf16 alone."""
    from transformers.integrations import moe

    name = "_can_use_grouped_mm"
    check = getattr(moe, name, None)  # of transformers 5.23
    if check:
        setattr(moe, name, lambda *_: False)
    try:
        yield
    finally:
        if check:
            setattr(moe, name, check)


@contextmanager
def _world(size: int, rank: int) -> Iterator[None]:
    """Pretend to be one of `size` processes whose collectives do nothing."""
    _clear_sharding_prop_cache()  # it has meshes of the world before
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
