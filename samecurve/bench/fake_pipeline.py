"""One rank of a pipeline by PyTorch's schedules on fake tensors, without its neighbours.

The schedule itself runs. What comes from other ranks are buffers that nobody fills; their shapes are told in advance.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import _utils as metadata

from samecurve.accelerator.gradient_norm import place_gradients
from samecurve.accelerator.mesh import Mesh
from samecurve.bench.fake_rank import CPU, StepTracker, meta_model
from samecurve.engines import tensor_parallel
from samecurve.engines.schedule_stages import HeadChunks, LocalStages
from samecurve.losses.cross_entropy import token_loss_sum
from samecurve.models.activation_checkpointing import checkpoint_layers
from samecurve.models.pipeline_split import split_layers
from samecurve.optim import factory
from samecurve.optim.dtensor import local_gradient
from samecurve.optim.parameter_groups import parameter_groups, roles_of
from samecurve.planner.job import Job
from samecurve.specs.precision import compute_dtype
from samecurve.strategy.plan import Plan


class FakePipeline:
    """Implementation of FakeRank. A step has as many micro-batches as the job."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, plan: Plan, job: Job, depth: int, mesh: Mesh):
        self._plan, self._job, self._mesh = plan, job, mesh
        assert mesh.sharding  # a mesh cannot be made of fake tensors
        mesh.group("pp")
        if mesh.dims.tp > 1:
            mesh.devices["tp"].get_group()
        if mesh.dims.dp_replicate > 1:
            mesh.group("dp_replicate")
        self._skeleton = meta_model(plan, job, depth * mesh.dims.pp)
        self._whole = meta_model(plan, job, depth * mesh.dims.pp)

    def allocate(self) -> None:
        """Build the rank's stages as ScheduledEngine does, without compilation and other kernels."""
        plan, whole, job = self._plan, self._whole, self._job
        recipe, dims = plan.recipe, self._mesh.dims
        summed = tensor_parallel.apply(whole, self._mesh, cuts_sequence=False) if dims.tp > 1 else []
        checkpoint_layers(whole, recipe.memory)
        self._chunks = HeadChunks(token_loss_sum) if dims.tp > 1 or job.chunked_loss else None
        autocast = compute_dtype(recipe.precision)
        self._stages = LocalStages(split_layers(whole), plan.strategy, autocast, self._mesh, self._chunks)
        weights = self._stages.weights
        self._summed = [weights[name] for name in summed if name in weights]
        self.module = nn.ModuleList(self._stages.modules.values()).train()
        groups = parameter_groups(weights.items(), recipe.optimizer, roles_of(self._skeleton))
        groups = tensor_parallel.groups_by_mesh(groups) if dims.tp > 1 else groups
        self.optimizer = factory.build_optimizer(groups, recipe.optimizer, recipe.precision, recipe.seed)
        rows, length, count = job.micro_batch, job.seq, job.grad_accum
        self._tokens = torch.zeros((count * rows, length), dtype=torch.long)
        self._positions = torch.arange(length).repeat(count * rows, 1)

    def inputs(self) -> list[Tensor]:
        return [self._tokens, self._positions]

    def _build_schedule(self) -> tuple[Any, list[PipelineStage]]:
        stages, count = [], self._stages.count
        for index, module in self._stages.modules.items():
            given, returned = self._passed(index), self._passed(index + 1)
            options = {"input_args": given, "output_args": returned, "group": self._mesh.group("pp")}
            stages.append(PipelineStage(module, index, count, CPU, **options))
        kind = schedules.get_schedule_class(self._plan.strategy.schedule)
        given = stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages
        schedule: Any = kind(given, self._job.grad_accum, loss_fn=self._loss, scale_grads=False)  # pyright: ignore
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

    def _loss(self, output: Tensor, nth: Tensor) -> Tensor:
        return output if self._chunks else token_loss_sum(output, self._tokens[: len(output)])

    def step(self, tracker: StepTracker | None) -> float:
        """Run the schedule; untracked, each stage with one micro-batch."""
        held, stages, labels = 0.0, self._stages, {"labels": self._tokens} if self._chunks else {}
        if tracker:
            schedule, parts = self._build_schedule()
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
        counted, again = stages.trained()
        tensor_parallel.sum_gradients(self._summed, self._mesh)
        place_gradients([*counted, *again])
        self._mesh.add([local_gradient(weight) for weight in (*counted, *again)], over=("dp_replicate",))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return held


def _without_neighbours(stages: list[Any], *_: bool) -> None:
    """Take the shapes that the stages were given, in place of a vote of all ranks."""
    for stage in stages:
        stage._inference_mode = metadata.InferenceMode.STATIC
