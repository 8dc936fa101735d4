"""Pipelines by the schedules of torch.distributed.pipelining: 1F1B, GPipe, interleaved and zero-bubble ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from samecurve.engines import fsdp, tensor_parallel
from samecurve.engines.first_step import FirstStep
from samecurve.engines.forward import evaluation_sums, measure_of
from samecurve.engines.gradient_norm import num_copies, place_gradients, squares_share
from samecurve.engines.memory_usage import memory_usage
from samecurve.engines.mesh import Mesh
from samecurve.engines.schedule_stages import LocalStages, Measures
from samecurve.engines.sharded_state import DTensorShards
from samecurve.engines.step_sums import step_result
from samecurve.engines.timed_stage import TimedStage
from samecurve.errors import ConfigurationError
from samecurve.interfaces.engine import EngineDescription, EvalResult, StepResult, dtype_name
from samecurve.interfaces.memory import MemoryUsage
from samecurve.interfaces.sharded_state import State
from samecurve.models import dropout
from samecurve.models.activation_checkpointing import checkpoint_layers
from samecurve.models.lora import trained_shapes
from samecurve.models.pipeline_split import split_layers
from samecurve.models.weights import load_weights
from samecurve.optim import factory
from samecurve.optim.dtensor import local_gradient, to_local
from samecurve.optim.schedule import set_learning_rate
from samecurve.planner.timetables import ScheduleRun
from samecurve.specs.precision import PRECISIONS, compute_dtype
from samecurve.strategy.parallel_dims import DIMENSIONS

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from samecurve.data.micro_batch import MicroBatch
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan


class ScheduledEngine:
    """Implementation of interfaces.engine.Engine. `skeleton` is the model on the meta device and stays there."""

    loss_scale_state: dict = {}

    def __init__(self, accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task):
        self._plan, self._skeleton, self._task = plan, skeleton, task
        self.recipe = plan.recipe
        self.device: torch.device = accelerator.device
        self._mesh = Mesh(plan.strategy.dims, accelerator.process_index, self.device)
        self.shard = self._mesh.shard
        _check_dropout(skeleton, plan)
        self._autocast = compute_dtype(self.recipe.precision)
        whole, dims = copy.deepcopy(skeleton), self._mesh.dims
        self._measures, summed = None, []
        if dims.tp > 1:  # on the meta device and by module, so that it may precede the cut into stages
            tensor_parallel.check(skeleton, plan.strategy)
            summed = tensor_parallel.apply(whole, self._mesh, cuts_sequence=False)
            self._measures = Measures(measure_of(task), partial(evaluation_sums, task))
        checkpoint_layers(whole, self.recipe.memory)
        self._stages = stages = LocalStages(
            split_layers(whole), plan.strategy, self._autocast, self._mesh, self._measures
        )
        self._summed = [stages.weights[name] for name in summed if name in stages.weights]
        self._module = nn.ModuleList(stages.modules.values()).train()
        self._tie_group = self._group_of_ends() if stages.tied else None

        self.shapes, settings = trained_shapes(skeleton), self.recipe.optimizer
        groups = factory.parameter_groups(stages.weights.items(), self.shapes, settings)
        groups = tensor_parallel.groups_by_mesh(groups) if dims.tp > 1 else groups
        self._optimizer = factory.build_optimizer(groups, settings, self.recipe.precision, self.recipe.seed)
        copies = partial(num_copies, mesh=self._mesh)
        self._first_step = FirstStep(plan, self._optimizer, self.shard, self._total, copies, readers=dims.tp)
        with torch.no_grad():
            load_weights(skeleton, self.recipe, self._write, names=set(stages.weights))
        trained = {name: weight for name, weight in stages.weights.items() if name in self.shapes}
        saved = {name for name in trained if stages.owner[name] in stages.modules}
        states = factory.state_names(settings, self.shapes)
        replica = dims.index(self._mesh.rank, *_OF_STAGE), dims.size(*_OF_STAGE)
        self.state: State = DTensorShards(trained, self._optimizer, states, replica, saved)
        self._loss_weight = math.nan
        # the last ones are kept, because rows that are grouped by length have many shapes
        self._schedule = lru_cache(maxsize=16)(self._build_schedule)

    def _group_of_ends(self) -> dist.ProcessGroup:
        """The first and the last rank of this pipeline; every process has to take part in making all such groups."""
        stages, groups = self._stages, {}
        for ranks in self._mesh.dims.groups("pp"):
            groups[ranks[0]] = dist.new_group([ranks[stages.rank_of(stage)] for stage in (0, stages.count - 1)])
        return groups[stages.peers[0]]

    def _write(self, name: str, full: Tensor) -> None:
        fsdp.write(self._stages.weights[name].detach(), full)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        stages, tokens = self._stages, self._count(micro_batches)
        if tokens == 0:
            return StepResult.of_nothing()
        set_learning_rate(self._optimizer, learning_rate)
        dims = self._mesh.dims
        averaged = dims.dp_shard  # FSDP2 averages gradients over these ranks; replicas sum theirs
        self._loss_weight = averaged / tokens
        run = ScheduleRun(stages.name, stages.rank, stages.ranks, len(micro_batches))
        with record_function(run.range):
            mean = self._forward_backward(micro_batches) / (averaged * dims.tp)
            counted, again = stages.trained()
            tensor_parallel.sum_gradients(self._summed, self._mesh)
            place_gradients([*counted, *again])
            for name in sorted(stages.tied & stages.weights.keys() & self.shapes.keys()):
                dist.all_reduce(local_gradient(stages.weights[name]), group=self._tie_group)
            gradients = [local_gradient(weight) for weight in (*counted, *again)]
            self._mesh.add(gradients, over=("dp_replicate",))
            squared = [squares_share(weights, self._mesh) for weights in (counted, again)]
            sums = torch.cat([mean.double().reshape(1), *squared])
            mean, squares, squares_again = self._total(sums)  # waits for the last rank
        grad_norm = math.sqrt(squares)
        applied = math.isfinite(mean) and math.isfinite(grad_norm)
        if applied:
            factor = min(1.0, self.recipe.optimizer.max_grad_norm / (grad_norm + 1e-6))
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            self._optimizer.step()
        self._optimizer.zero_grad()
        result = step_result(mean, grad_norm, tokens, applied, may_rescale=False)
        return self._first_step.checked(result, learning_rate, math.sqrt(squares + squares_again))

    def _forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Run the schedule and return this rank's part of the step's loss, 0 without the last stage."""
        stages = self._stages
        if stages.has_first:  # the rows are read where they enter the pipeline
            for batch in micro_batches:
                self._first_step.read(batch)
        # a schedule cuts a step's rows into equal parts
        most = max(len(batch.labels) for batch in micro_batches)
        rows = [batch.padded(len(batch.labels), most).to(self.device) for batch in micro_batches]
        input_ids, position_ids = (torch.cat([each.inputs[name] for each in rows]) for name in _INPUTS)
        labels, losses = torch.cat([each.labels for each in rows]), []
        schedule = self._schedule(input_ids.shape, len(rows))
        inputs = (input_ids,) if stages.has_first else ()
        # losses are read from the list: the loss function is also called once on no values, to find out shapes
        last = {"target": labels, "losses": losses} if stages.has_last else {}
        of_last = {"labels": labels} if self._measures else {}
        schedule.step(*inputs, position_ids=position_ids, return_outputs=False, **of_last, **last)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    def _build_schedule(self, shape: torch.Size, num_micro_batches: int) -> Any:
        """Build the schedule of steps of one shape of input_ids: PyTorch's stages keep the shapes of their first."""
        kind = schedules.get_schedule_class(self._plan.strategy.pipeline_schedule)
        stages = [
            TimedStage(module, stage, self._stages.count, self.device, group=self._mesh.group("pp"))
            for stage, module in self._stages.modules.items()
        ]
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        # losses are weighted by the step's tokens, so that gradients need no division by the micro-batches
        return kind(stages[0] if single else stages, num_micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        loss = output if self._measures else self._task.step_loss(output, labels=labels)[0]
        return loss * self._loss_weight

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        sums, tokens = torch.zeros(1, dtype=torch.float64, device=self.device), self._count(micro_batches)
        for batch in micro_batches:
            batch = batch.to(self.device)
            found = self._run(batch, batch.labels if self._measures else None)
            if found is not None:
                found = found if self._measures else evaluation_sums(self._task, found, **batch.targets)
                sums = sums + found if len(sums) == len(found) else found
        loss, *statistics = self._total(sums / self._mesh.dims.tp)
        return EvalResult(loss=loss / max(tokens, 1), tokens=tokens, statistics=tuple(statistics))

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        raise NotImplementedError("tasks with features are refused before")

    def outputs(self, batch: MicroBatch) -> Tensor | None:
        batch = batch.to(self.device)
        logits, last = self._run(batch), self._stages.global_rank(self._stages.count - 1)
        if 0 not in self._stages.peers:  # the other pipelines compute the same
            return None
        if last == 0:
            return logits.float().cpu() if logits is not None else None
        if logits is not None:
            dist.send(logits.float().contiguous(), dst=0)
        if self._mesh.rank != 0:
            return None
        found = torch.empty(*batch.labels.shape, self._skeleton.config.vocab_size, device=self.device)
        dist.recv(found, src=last)
        return found.cpu()

    def _run(self, batch: MicroBatch, labels: Tensor | None = None) -> Tensor | None:
        self._module.eval()
        input_ids, position_ids = (batch.inputs[name] for name in _INPUTS)
        found = self._stages.forward(input_ids, position_ids, self._skeleton.config.hidden_size, labels)
        self._module.train()
        return found

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        rank, stages = self._mesh.rank, self._stages
        first_pipeline = self._mesh.dims.groups("pp")[0]
        for name, shape in self.shapes.items():
            owner, full = stages.rank_of(stages.owner[name]), None
            sender = first_pipeline[owner]
            if stages.rank == owner:
                full = stages.weights[name].detach().float()
                full = full.full_tensor() if isinstance(full, DTensor) else full
                if rank == sender != 0:
                    dist.send(full, dst=0)
            elif rank == 0:
                full = torch.empty(shape, device=self.device)
                dist.recv(full, src=sender)
            yield name, full.cpu() if full is not None and rank == 0 else None

    def memory_usage(self) -> MemoryUsage:
        return memory_usage(self._module, self._optimizer, self.describe())

    def describe(self) -> EngineDescription:
        recipe, weights = self.recipe, self._stages.weights
        num_parameters = sum(to_local(weight).numel() for weight in weights.values())
        sharded = any(isinstance(module, FSDPModule) for module in self._stages.modules.values())
        return EngineDescription(
            engine=schedules.get_schedule_class(self._plan.strategy.pipeline_schedule).__name__,
            optimizer=type(self._optimizer).__name__,
            world_size=dist.get_world_size(),
            data_parallel_size=self.shard[1],
            pipeline_stages=self._stages.ranks,
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
            tensor_parallel_size=tensor_parallel.cut_size(weights),
            loss_implementation="chunked" if self._measures else "full",
            # they are reduced after the step's last backward pass
            whole_gradient_bytes=4 * num_parameters * self._mesh.dims.dp_shard if sharded else 0,
        )

    def _count(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Count the tokens (or other units, see Task.count) of the micro-batches over all ranks."""
        return self._mesh.count(micro_batches, self._task.count).trained

    def _total(self, values: Tensor) -> tuple[float, ...]:
        return self._mesh.sum(values, over=DIMENSIONS)


_INPUTS = ("input_ids", "position_ids")
_OF_STAGE = ("dp_replicate", "dp_shard", "tp")  # ranks that differ in these have the same stages


def _check_dropout(skeleton: PreTrainedModel, plan: Plan) -> None:
    # GPT-2's summary_first_dropout belongs to a head that no causal language model has
    rates = {key: rate for key, rate in dropout.rates(skeleton.config).items() if not key.startswith("summary_")}
    if rates:
        named = ", ".join(f"{key} {rate}" for key, rate in rates.items())
        raise ConfigurationError(
            f"{plan.strategy.path}: the model has dropout ({named}), which has not been compared with one process "
            "under a pipeline schedule; set the rates to 0 in model.config, or use configs/pipeline.yaml"
        )
