"""Pipelines by the schedules of torch.distributed.pipelining: 1F1B, GPipe, interleaved and zero-bubble ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import record_function

from samecurve.accelerator import fsdp
from samecurve.accelerator.gradient_norm import num_copies, place_gradients, squares_share
from samecurve.accelerator.mesh import describe_live_mesh
from samecurve.accelerator.sharded_state import DTensorShards
from samecurve.engines import tensor_parallel, torch_pipeline_stages
from samecurve.engines.first_step import FirstStep
from samecurve.engines.forward import evaluation_sums, measure_of, most_rows, task_contexts
from samecurve.engines.loss_implementation import last_stage_takes_chunks
from samecurve.engines.memory_usage import memory_usage
from samecurve.engines.momentum_encoder import MomentumEncoder
from samecurve.engines.stage_weights import on_rank_0
from samecurve.engines.step_sums import step_result
from samecurve.engines.teacher import StagedTeacher
from samecurve.engines.torch_pipeline_forward import TorchPipelineForward
from samecurve.engines.torch_pipeline_stages import HeadChunks, LocalStages
from samecurve.interfaces.engine import EngineDescription, EvalResult, MemoryUsage, StepResult, dtype_name
from samecurve.interfaces.sharded_state import State
from samecurve.models import compilation, dropout
from samecurve.models.hf_config import is_classifier
from samecurve.models.lora import trained_shapes
from samecurve.models.pipeline_split import split_layers
from samecurve.models.weights import load_weights
from samecurve.optim import factory
from samecurve.optim.dtensor import local_gradient, local_numel
from samecurve.optim.parameter_groups import parameter_groups, roles_of
from samecurve.optim.schedule import set_learning_rate
from samecurve.specs.precision import PRECISIONS, compute_dtype
from samecurve.strategy.parallel_dims import DIMENSIONS
from samecurve.strategy.timetables import Pass, ScheduleRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan


class StepLoss:
    """Loss function of a schedule, which calls it with an output of the last stage and a micro-batch's number.

    A schedule's target has to be one tensor, and schedules are kept from step to step: so what a step computes the loss
    of is bound for the time of the step.
    """

    def __init__(self, compute: Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor]]):
        self._compute = compute  # -> loss and statistics
        self._step: tuple[Sequence[MicroBatch], float, dict[int, Tensor]] | None = None

    @contextmanager
    def of(self, rows: Sequence[MicroBatch], weight: float) -> Iterator[dict[int, Tensor]]:
        """Bind a step's micro-batches. Yields loss and statistics of each one that has been computed, fp64."""
        sums: dict[int, Tensor] = {}
        self._step = rows, weight, sums
        try:
            yield sums
        finally:
            self._step = None

    def __call__(self, output: Tensor, nth: Tensor) -> Tensor:
        """Compute the weighted loss of the `nth` micro-batch: int64, (1,), on the CPU.

        PyTorch also calls this function before the first step of a schedule, with an `output` without values, to infer
        shapes; the real pass then overwrites those sums.
        """
        assert self._step is not None, "a schedule runs outside of a step"
        rows, weight, sums = self._step
        loss, statistics = self._compute(output, rows[int(nth)])
        sums[int(nth)] = torch.cat([loss.detach().reshape(1), statistics]).double()
        return loss * weight


class TorchPipelineEngine:
    """Implementation of interfaces.engine.Engine. `skeleton` is the model on the meta device and stays there."""

    loss_scale_state: dict = {}

    def __init__(self, accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task):
        self._assemble(accelerator, plan, skeleton, task)
        self.state = self._build_state()
        stages, dims = self._stages, self._mesh.dims
        self._forward = TorchPipelineForward(
            stages,
            self._module,
            self._mesh,
            skeleton,
            task,
            self._dropout,
            self._chunks,
            teacher=StagedTeacher(plan.strategy, self._mesh, task) if task.teacher else None,
        )
        self._tie_group = stages.group_of_ends() if stages.tied else None
        with torch.no_grad():
            load_weights(
                skeleton,
                self.recipe,
                lambda name, full: fsdp.write(stages.weights[name].detach(), full),
                names=set(stages.weights),
            )
        copies = partial(num_copies, mesh=self._mesh)
        self._first_step = FirstStep(
            plan, self._optimizer, self.state, self.shard, self._total, copies, readers=dims.tp
        )
        self._encoder = MomentumEncoder.of(task, self.state, skeleton, self._mesh)
        self.state = self._encoder or self.state
        self._micro_rows = self.recipe.batch.micro_batches(self.shard[1])
        self._step_loss = StepLoss(self._loss)
        # the last ones are kept, because rows that are grouped by length have many shapes
        self._schedule = lru_cache(maxsize=16)(self._build_schedule)

    def _assemble(self, accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task) -> None:
        """Build this rank's stages, with weights of no value yet, and their optimizer."""
        self._plan, self._skeleton, self._task = plan, skeleton, task
        self.recipe = plan.recipe
        self.device: torch.device = accelerator.device
        self._mesh = accelerator.mesh
        self.shard = self._mesh.shard
        self._autocast, dims = compute_dtype(self.recipe.precision), plan.strategy.dims
        # The order matters. Tensor parallelism divides a model by its modules, on the meta device, and so precedes the
        # cut into stages; dropout knows both parts and stages; what a layer computes is settled before FSDP2, which
        # `LocalStages` installs with the stages. The optimizer takes the weights of this rank's stages, and values are
        # loaded at last, into what it keeps of them.
        whole, summed = self._build(), []
        if dims.tp > 1:
            tensor_parallel.check(skeleton, plan.strategy)
            # names of weights whose gradients are sums over these ranks
            summed = tensor_parallel.apply(whole, self._mesh, cuts_sequence=False)
        self._chunks = None
        if dims.tp > 1 or last_stage_takes_chunks(whole, skeleton, task, self.recipe):
            measures = (measure_of(task), partial(evaluation_sums, task)) if task.by_token else ()
            self._chunks = HeadChunks(*measures)
        parts = tensor_parallel.parts(whole, self._mesh)
        self._dropout = dropout.install(whole, self.recipe.seed, self.device, parts=parts)
        compilation.prepare(whole, self.recipe, self.device, is_cut=dims.tp > 1)
        padding = skeleton.config.pad_token_id if is_classifier(skeleton) else None
        self._stages = stages = LocalStages(
            split_layers(whole), plan.strategy, self._autocast, self._mesh, self._chunks, padding
        )
        self._summed = [stages.weights[name] for name in summed if name in stages.weights]
        self._module = nn.ModuleList(stages.modules.values()).train()
        self.shapes = trained_shapes(skeleton)
        self._optimizer = self._build_optimizer()

    def _build(self) -> PreTrainedModel:
        return copy.deepcopy(self._skeleton)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        settings = self.recipe.optimizer
        groups = parameter_groups(self._stages.weights.items(), settings, roles_of(self._skeleton))
        groups = groups or [{"params": [torch.zeros(0, device=self.device)]}]  # torch refuses one without any weight
        groups = tensor_parallel.groups_by_mesh(groups) if self._mesh.dims.tp > 1 else groups
        return factory.build_optimizer(groups, settings, self.recipe.precision, self.recipe.seed)

    def _build_state(self) -> State:
        stages, dims = self._stages, self._mesh.dims
        trained = {name: weight for name, weight in stages.weights.items() if name in self.shapes}
        saved = {name for name in trained if stages.owner[name] in stages.modules}
        states = factory.state_names(self.recipe.optimizer, self.shapes)
        replica = dims.index(self._mesh.rank, *_OF_STAGE), dims.size(*_OF_STAGE)
        return DTensorShards(trained, self._optimizer, states, replica, saved)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        stages, counts = self._stages, self._forward.count(micro_batches)
        if counts.trained == 0:
            return StepResult.of_nothing()
        set_learning_rate(self._optimizer, learning_rate)
        dims = self._mesh.dims
        weight = dims.dp_shard / counts.divisor  # FSDP2 averages gradients over these ranks; replicas sum theirs
        run = ScheduleRun(stages.name, stages.rank, stages.ranks, len(micro_batches))
        rows = self._prepared(micro_batches)
        with record_function(run.range):
            # the same on all tp ranks, which `_total` adds up
            sums = self._forward_backward(rows, weight) / dims.tp
            del rows  # they may have a teacher's hidden states
            counted, again = self._complete_gradients()
            gradients = [local_gradient(weight) for weight in (*counted, *again)]
            squared = [squares_share(weights, self._mesh) for weights in (counted, again)]
            # waits for the last rank
            squares, squares_again, loss, *statistics = self._total(torch.cat([*squared, sums]))
        mean, grad_norm = loss / counts.divisor, math.sqrt(squares)
        applied = math.isfinite(mean) and math.isfinite(grad_norm)
        if applied:
            factor = min(1.0, self.recipe.optimizer.max_grad_norm / (grad_norm + 1e-6))
            if factor != 1.0 and gradients:  # a stage may be frozen as a whole
                torch._foreach_mul_(gradients, factor)
            self._optimizer.step()
            if self._encoder is not None:
                self._encoder.update()
        self._optimizer.zero_grad()
        result = step_result(mean, grad_norm, counts.trained, applied, may_rescale=False, statistics=tuple(statistics))
        return self._first_step.checked(result, learning_rate, math.sqrt(squares + squares_again))

    def _complete_gradients(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Sum the gradients over the ranks that compute parts of them. Returns the weights, see LocalStages.trained."""
        stages = self._stages
        counted, again = stages.trained()
        tensor_parallel.sum_gradients(self._summed, self._mesh)
        place_gradients([*counted, *again])
        for name in sorted(stages.tied & stages.weights.keys() & self.shapes.keys()):  # one order on both ends
            dist.all_reduce(local_gradient(stages.weights[name]), group=self._tie_group)
        self._mesh.add([local_gradient(weight) for weight in (*counted, *again)], over=("dp_replicate",))
        return counted, again

    def _prepared(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Pad the micro-batches to equal size, and add targets that need forward passes of their own. Collective."""
        if self._stages.has_first:  # the rows are read where they enter the pipeline
            for batch in micro_batches:
                self._first_step.read(batch)
        # a schedule cuts a step's rows into equal parts
        sizes, most = self._micro_rows[self.shard[0]], most_rows(self._micro_rows)
        padded = (batch.padded(max(n, 1), most) for batch, n in zip(micro_batches, sizes, strict=True))
        rows = [self._forward.with_teacher(batch.to(self.device)) for batch in padded]
        self._dropout.queue(rows)
        self._dropout.use_next()  # the schedule also runs the first rows once to find out shapes
        if self._task.context is None:
            return rows
        compute = partial(self._forward.features, rows, drops=True)
        contexts = task_contexts(
            self._task, compute, self._micro_rows, self.shard[0], padded=True, encoder=self._encoder
        )
        return [
            replace(micro_batch, targets=micro_batch.targets | more)
            for micro_batch, more in zip(rows, contexts, strict=True)
        ]

    def _forward_backward(self, rows: Sequence[MicroBatch], weight: float) -> Tensor:
        """Run the schedule over the prepared rows. The gradients are those of the loss's sum x `weight`.

        Returns:
            Loss and statistics, see Task.step_loss, summed over the micro-batches: fp64, 0 without the last stage.
        """
        stages = self._stages
        input_ids, position_ids = map(torch.cat, zip(*map(torch_pipeline_stages.inputs, rows), strict=True))
        inputs = (input_ids,) if stages.has_first else ()
        last = {"target": torch.arange(len(rows))} if stages.has_last else {}
        names = ("labels", "weights") if self._chunks else ()
        of_last = {n: torch.cat([batch.targets[n] for batch in rows]) for n in names if n in rows[0].targets}
        schedule = self._schedule(input_ids.shape, len(rows))
        with self._step_loss.of(rows, weight) as sums, self._dropout.check_draws():
            schedule.step(*inputs, position_ids=position_ids, return_outputs=False, **of_last, **last)
        nothing = torch.zeros(1 + self._task.num_step_statistics, dtype=torch.float64, device=self.device)
        return sum(sums.values(), nothing)

    def _build_schedule(self, shape: torch.Size, num_micro_batches: int) -> Any:
        """Build the schedule of steps of one shape of input_ids: PyTorch's stages keep the shapes of their first."""
        kind = schedules.get_schedule_class(self._plan.strategy.schedule)
        stages = [
            TimedStage(self._dropout.use, module, stage, self._stages.count, self.device, group=self._mesh.group("pp"))
            for stage, module in self._stages.modules.items()
        ]
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        # losses are weighted by the step's tokens, so that gradients need no division by the micro-batches
        return kind(stages[0] if single else stages, num_micro_batches, loss_fn=self._step_loss, scale_grads=False)

    def _loss(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Compute Task.step_loss from what the last stage returns for a micro-batch."""
        if self._chunks and self._chunks.has_sums:
            return output, output.new_zeros(0)
        return self._task.step_loss(self._stages.read_out(output, batch), **self._forward.targets(batch))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        return self._forward.evaluate(micro_batches)

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return self._forward.features(micro_batches).cpu()

    def outputs(self, batch: MicroBatch, positions: Tensor | None = None) -> Tensor | None:
        return self._forward.outputs(batch, positions)

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        return on_rank_0(self.shapes, self.device, self._stages.sender, self._stages.whole)

    def memory_usage(self) -> MemoryUsage:
        return memory_usage(self._module, self._optimizer, self.describe(), self._encoder)

    def describe(self) -> EngineDescription:
        recipe, weights, taught = self.recipe, self._stages.weights, self._forward.teacher
        num_parameters = local_numel(weights.values())
        sharded = any(isinstance(module, FSDPModule) for module in self._stages.modules.values())
        replicas = self._mesh.group("dp_replicate") if self._mesh.dims.dp_replicate > 1 else None
        groups = {"pp": self._stages.group, "dp_replicate": replicas}
        return EngineDescription(
            engine=schedules.get_schedule_class(self._plan.strategy.schedule).__name__,
            optimizer=type(self._optimizer).__name__,
            world_size=dist.get_world_size(),
            layers_per_stage=self._stages.layers_per_stage,
            device=str(self.device),
            num_parameters=self._skeleton.num_parameters(),
            num_trained_parameters=sum(shape.numel() for shape in self.shapes.values()),
            num_parameters_per_rank=num_parameters,
            precision=PRECISIONS[dtype_name(self._autocast or torch.float32)],
            micro_batch_size=recipe.batch.micro_batch_size,
            gradient_accumulation_steps=recipe.batch.accumulation_steps(self.shard[1]),
            gradient_clipping=recipe.optimizer.max_grad_norm,
            weight_dtype=dtype_name(next(iter(weights.values())).dtype),
            reduce_dtype="fp32" if sharded else None,
            sharded=sharded,
            **describe_live_mesh([*weights.values()], groups),
            num_teacher_parameters_per_rank=taught.num_parameters_per_rank if taught else 0,
            loss_implementation="chunked" if self._chunks else "full",
            # they are reduced after the step's last backward pass
            whole_gradient_bytes=4 * num_parameters * self._mesh.dims.dp_shard if sharded else 0,
        )

    def _total(self, values: Tensor) -> tuple[float, ...]:
        return self._mesh.sum(values, over=DIMENSIONS)


_OF_STAGE = ("dp_replicate", "dp_shard", "tp")  # ranks that differ in these have the same stages


class TimedStage(PipelineStage):
    """A PipelineStage with a profiler range around each pass. Sends and receives are outside of the ranges.

    Args:
        begin: called with a micro-batch's number before each of its passes, because the passes of micro-batches
            alternate.
    """

    def __init__(self, begin: Callable[[int], None], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._begin = begin

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._range("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._range("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._range("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _range(self, kind: str, micro_batch: int) -> record_function:
        self._begin(micro_batch)
        return record_function(Pass(self.stage_index, kind, micro_batch).range)
