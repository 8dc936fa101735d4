"""One rank of N on fake tensors: torch's fake process group stands for the other ranks, and its MemTracker counts.

Both are private (torch 2.13). The engines' own steps build model and optimizer; a step is one that needs no values.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import _utils as metadata
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from transformers.integrations import moe

from samecurve.accelerator import fsdp, launch_env
from samecurve.accelerator.mesh import Mesh
from samecurve.engines import context_parallel, expert_parallel, start, tensor_parallel
from samecurve.engines.context_parallel import SequencePart
from samecurve.engines.torch_engine import TorchEngine
from samecurve.engines.torch_pipeline import TorchPipelineEngine
from samecurve.losses.chunked_cross_entropy import TokenSums
from samecurve.losses.cross_entropy import token_loss_sum
from samecurve.models import fp32_weights, quantized
from samecurve.models.attention import varlen
from samecurve.models.hf_config import model_config
from samecurve.models.skeleton import construct
from samecurve.planner.activations import expert_imbalance
from samecurve.planner.job import Job
from samecurve.specs.precision import compute_dtype
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


# What building asks of a task: that of the next token, without data.
TASK = cast(Any, SimpleNamespace(loss=token_loss_sum, by_token=True, by_log_probability=False, teacher=None))


class FakeAccelerator:
    """What engines need of an Accelerator to build a model: without a process group of its own, DDP and autocast."""

    device = CPU
    is_main_process = True

    def __init__(self, plan: Plan, mesh: Mesh):
        self.mesh = mesh
        self.process_index, self.num_processes = mesh.rank, mesh.dims.world_size
        self.gradient_state = SimpleNamespace(plugin_kwargs={})
        launch_env.export_launch_env(plan.strategy)
        self.state = SimpleNamespace(**start.plugins(plan))

    def prepare_model(self, model: nn.Module, evaluation_mode: bool = False, whole: Iterable[str] = ()) -> nn.Module:
        is_sharded = hasattr(self.state, "fsdp_plugin")
        return fsdp.shard(cast(Any, self), cast(Any, model), self.mesh, [*whole]) if is_sharded else model


class FakeModel(TorchEngine):
    """A rank of a strategy without a pipeline. Built outside of FakeTensorMode, where building takes minutes."""

    def __init__(self, plan: Plan, job: Job, depth: int, mesh: Mesh):
        self.plan, self._job, self._fake = plan, job, FakeAccelerator(plan, mesh)
        dims = plan.strategy.dims
        if plan.strategy.shards_model:
            assert mesh.sharding  # a mesh cannot be made of fake tensors
        if dims.tp > 1:
            mesh.devices["tp"].get_group()
        if dims.ep > 1:
            mesh.experts["ep"].get_group()
            mesh.experts["efsdp"].get_group()
        self.skeleton = meta_model(plan, job, depth)
        if dims.cp > 1:
            model = context_parallel.build(self.skeleton, plan.recipe, plan.strategy, mesh, plan.recipe.adapter)
        else:
            model = meta_model(plan, job, depth)
        self._meta = quantized.quantize_layers(model, plan.recipe)
        # what would need values in FakeTensorMode, or replace meta tensors by fake ones
        for layer in (part for part in self._meta.modules() if isinstance(part, quantized.QuantizedLinear)):
            layer.quantize(torch.zeros(layer.out_features, layer.in_features))
        if plan.strategy.shards_model:
            fp32_weights.store_frozen_in_bf16(self._meta, plan.recipe, everywhere=True)

    def allocate(self) -> None:
        self._assemble(cast(Any, self._fake), self.plan, self.skeleton, TASK)
        if self.plan.strategy.dims.ep > 1:
            imbalance = expert_imbalance(self._job)
            for experts in expert_parallel.experts_of(self.module).values():
                experts.forward.announce = partial(_announce, experts.forward, imbalance)  # pyright: ignore
        rows, length = self._job.micro_batch, self._job.seq
        # under context parallelism, angles and masks are made of whole rows' positions
        self._tokens = torch.zeros((rows, length // self._job.dims.cp), dtype=torch.long)
        self._positions = torch.arange(length).expand(rows, length)

    def _build(self, part: SequencePart) -> Any:
        """Return the model that was built outside of FakeTensorMode; what nothing divides is allocated at once."""
        return self._meta if self.sharded or self.cut else tensor_parallel.allocate(self._meta, CPU)

    def inputs(self) -> list[Tensor]:
        return [self._tokens, self._positions]

    def fake_step(self, tracker: StepTracker | None) -> float:
        """Train a step of at most two micro-batches."""
        held, precision = 0.0, self.recipe.precision
        autocast = not (self.sharded or self.copies) and precision != "fp32"
        context = torch.autocast("cpu", compute_dtype(precision)) if autocast else nullcontext()
        for _ in range(min(self._job.grad_accum, 2)):
            with context:
                inputs = {"input_ids": self._tokens, "position_ids": self._positions}
                if not self._job.chunked_loss:
                    loss = token_loss_sum(self.module(**inputs).logits, self._tokens)
                else:
                    loss = self.module(**inputs, sums=TokenSums(token_loss_sum, {"labels": self._tokens}, None))
            loss.backward()
            del loss
            held = tracker.bytes_now() if tracker else 0.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return held


def _announce(
    dispatch: expert_parallel.Dispatch, imbalance: float, chosen: Tensor
) -> tuple[Tensor, list[int], list[int]]:
    """Stand in for Dispatch.announce, which needs the router's choices: every rank sends equally many tokens to each.

    What arrives is `imbalance` times as much, as the formulas assume of the rank whose experts get the most.
    """
    ranks = dispatch.group.size()
    sent = [len(chosen) // ranks + (rank < len(chosen) % ranks) for rank in range(ranks)]
    received = [round(imbalance * sent_tokens) for sent_tokens in sent]
    return chosen.new_zeros(sum(received)), sent, received


class FakePipeline(TorchPipelineEngine):
    """A rank of PyTorch's schedules, without its neighbours. A step has as many micro-batches as the job.

    What comes from other ranks are buffers that nobody fills; their shapes are told in advance.
    """

    _tie_group = None  # collectives do nothing, in whichever group

    def __init__(self, plan: Plan, job: Job, depth: int, mesh: Mesh):
        self._plan, self._job, self._fake = plan, job, FakeAccelerator(plan, mesh)
        assert mesh.sharding  # a mesh cannot be made of fake tensors
        mesh.group("pp")
        if mesh.dims.tp > 1:
            mesh.devices["tp"].get_group()
        if mesh.dims.dp_replicate > 1:
            mesh.group("dp_replicate")
        self._skeleton, self._meta = (meta_model(plan, job, depth * mesh.dims.pp) for _ in range(2))

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def allocate(self) -> None:
        self._assemble(cast(Any, self._fake), self._plan, self._skeleton, TASK)
        rows, length, count = self._job.micro_batch, self._job.seq, self._job.grad_accum
        self._tokens = torch.zeros((count * rows, length), dtype=torch.long)
        self._positions = torch.arange(length).repeat(count * rows, 1)

    def _build(self) -> Any:
        return self._meta  # was built outside of FakeTensorMode

    def inputs(self) -> list[Tensor]:
        return [self._tokens, self._positions]

    def _fake_schedule(self) -> tuple[Any, list[PipelineStage]]:
        stages, count = [], self._stages.count
        for index, module in self._stages.modules.items():
            given, returned = self._passed(index), self._passed(index + 1)
            options = {"input_args": given, "output_args": returned, "group": self._mesh.group("pp")}
            stages.append(PipelineStage(module, index, count, CPU, **options))
        kind = schedules.get_schedule_class(self._plan.strategy.schedule)
        given = stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages
        schedule: Any = kind(given, self._job.grad_accum, loss_fn=self._fake_loss, scale_grads=False)  # pyright: ignore
        schedule._warmup_p2p = _without_neighbours
        return schedule, stages

    def _passed(self, stage: int) -> Tensor:
        """Return a tensor like that which a stage takes in, or which the last stage returns."""
        rows, shape, count = self._job.micro_batch, self._job.shape, self._stages.count
        sizes, dtype = [rows, self._job.seq, shape.hidden], torch.float32
        if stage == 0:
            sizes, dtype = sizes[:2], torch.long
        elif stage == count:
            sizes = [] if self._chunks else [*sizes[:2], shape.vocab]
        return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=stage > 0)

    def _fake_loss(self, output: Tensor, nth: Tensor) -> Tensor:
        return output if self._chunks else token_loss_sum(output, self._tokens[: len(output)])

    def fake_step(self, tracker: StepTracker | None) -> float:
        """Run the schedule; untracked, each stage with one micro-batch."""
        held, stages, labels = 0.0, self._stages, {"labels": self._tokens} if self._chunks else {}
        if tracker:
            schedule, parts = self._fake_schedule()
            inputs = (self._tokens,) if stages.has_first else ()
            last = {"target": torch.arange(self._job.grad_accum)} if stages.has_last else {}
            schedule.step(*inputs, position_ids=self._positions, return_outputs=False, **labels, **last)
            del schedule, parts
            gc.collect()  # the received buffers, which their stages hold in a circle
            held = tracker.bytes_now()
        else:
            rows = slice(self._job.micro_batch)
            for index, module in stages.modules.items():
                given = torch.zeros_like(self._passed(index), device=CPU)
                labels = {name: tensor[rows] for name, tensor in labels.items()}
                module(given, self._positions[rows], **labels).sum().backward()
        self._complete_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return held


def _without_neighbours(stages: list[Any], *_: bool) -> None:
    """Take the shapes that the stages were given, in place of a vote of all ranks."""
    for stage in stages:
        stage._inference_mode = metadata.InferenceMode.STATIC


def track(plan: Plan, job: Job, rank: int, depth: int) -> Tracked:
    """Train two steps of a rank on fake tensors, with `depth` layers of each rank; the second one is tracked."""
    join = DeviceMesh._concatenate

    def real(*arguments: Any) -> DeviceMesh:
        with unset_fake_temporarily():
            return join(*arguments)

    # FSDP joins its mesh with that of cut or spread weights, outside FakeTensorMode
    meshes = patch.object(DeviceMesh, "_concatenate", staticmethod(real))
    # experts compute their products one by one: torch knows the shapes of grouped ones in bf16 alone
    products = patch.object(moe, "_can_use_grouped_mm", lambda *_: False)
    with meshes, products, _world(job.dims.world_size, rank):
        kind = FakePipeline if plan.strategy.torch_schedule else FakeModel
        fake = kind(plan, job, depth, Mesh(plan.strategy.dims, rank, CPU))
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake.allocate()
            # Untracked: the first step propagates DTensors' shapes on tensors of full size, which would be counted.
            fake.fake_step(None)
            tracker = StepTracker()
            tracker.track_external(fake.module, fake.optimizer, *fake.inputs())
            with tracker:
                states = fake.fake_step(tracker)
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
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    return construct(cast(Any, kind), config, torch.device("meta"), plan.recipe.adapter)


def _bytes(tracker: MemTracker, kind: str) -> dict[str, float]:
    """Return the bytes by kind of tensor, all devices of the fake rank together being its CPU."""
    return {str(key): float(value) for key, value in tracker.get_tracker_snapshot(kind)[CPU].items()}


@contextmanager
def _world(size: int, rank: int) -> Iterator[None]:
    """Pretend to be one of `size` processes whose collectives do nothing."""
    _clear_sharding_prop_cache()  # it has meshes of the world before
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
