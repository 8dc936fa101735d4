"""Pipeline parallelism: DeepSpeed's PipelineModule behind the interface of interfaces/engine.py.

DeepSpeed runs a whole step in one call, train_batch. This engine adds around and inside that call what the other
engines do for each step: the token mean over the whole step, the refusal of a non-finite loss or gradient, and fp32
master weights made from unrounded values. Each process builds and fills only the layers of its own stage.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from samecurve.accelerator import deepspeed_introspection
from samecurve.accelerator.sharded_state import DeepSpeedParameter, DTensorShards, Zero12Shards
from samecurve.engines.deepspeed_stage import build_stage
from samecurve.engines.first_step import FirstStep
from samecurve.engines.forward import at_positions, evaluation_sums, most_rows, task_contexts
from samecurve.engines.memory_usage import memory_usage
from samecurve.engines.stage_weights import on_rank_0
from samecurve.engines.step_sums import step_result
from samecurve.errors import ConfigurationError
from samecurve.interfaces.engine import EngineDescription, EvalResult, MemoryUsage, StepResult, dtype_name
from samecurve.interfaces.sharded_state import State
from samecurve.models import compilation, dropout, liger
from samecurve.models.lora import trained_shapes
from samecurve.models.pipeline_split import split_layers
from samecurve.models.weights import load_weights
from samecurve.optim.dtensor import sum_of_squares
from samecurve.optim.factory import build_optimizer, state_names
from samecurve.optim.parameter_groups import parameter_groups, roles_of
from samecurve.optim.schedule import set_learning_rate
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import resolve_auto

if TYPE_CHECKING:
    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.engines.deepspeed_stage import StageModule
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan


class DeepSpeedPipelineEngine:
    """Implementation of interfaces.engine.Engine. `skeleton` is the model on the meta device and stays there."""

    def __init__(self, accelerator: Accelerator, plan: Plan, skeleton: PreTrainedModel, task: Task):
        self._task = task
        self.device: torch.device = accelerator.device
        self._mesh = accelerator.mesh
        self._loss_factor, self._target_names = 1.0, ("labels",)
        self._last_stage: Callable[..., Tensor] = self._weighted_loss
        self.shapes, self._num_parameters = trained_shapes(skeleton), skeleton.num_parameters()
        model = copy.deepcopy(skeleton)
        self._dropout = dropout.install(model, plan.recipe.seed, self.device)
        compilation.prepare(model, plan.recipe, self.device, but="full")  # the stage itself does full checkpointing
        self._kernels = tuple(liger.replaced(model))
        module = self._module = build_stage(plan, split_layers(model), self._loss, self.device, self._dropout)
        self._weights, self._stages = module.named_weights(), module.stages_by_name()
        _check_trained({self._stages[name] for name in self.shapes}, plan.strategy.dims.pp)

        settings = self._settings = plan.recipe.optimizer
        groups = parameter_groups(self._weights.items(), settings, roles_of(skeleton), self.shapes)
        optimizer = build_optimizer(module.padded(groups), settings)
        # without "auto", which only Accelerate would replace: DeepSpeed itself keeps the string
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=resolve_auto(plan))
        assert isinstance(engine, deepspeed.PipelineEngine)  # because the model is a PipelineModule
        deepspeed_introspection.link_masters(engine)
        self._engine, self._grid, self._guard = engine, module.mpu(), PipelineGuard(engine, module, self.device)
        self._optimizer: Any = engine.optimizer  # DeepSpeed's optimizers have no base class in common
        # other optimizers than these two update every weight on every rank
        copies = 1 if isinstance(engine.optimizer, DeepSpeedZeroOptimizer | BF16_Optimizer) else self.shard[1]
        self.state = self._state()
        self._first_step = FirstStep(
            plan,
            engine.optimizer,
            self.state,
            self.shard,
            add=lambda values: sum_over_ranks(values.tolist(), self.device),
            copies=lambda parameter: copies,
        )
        self._micro_rows = plan.recipe.batch.micro_batches(self.shard[1])
        self._shape: torch.Size | None = None
        # after initialization, because DeepSpeed casts weights to bf16 and copies its fp32 masters from rounded weights
        load_weights(skeleton, plan.recipe, self._write, names=set(self._weights))

    @property
    def shard(self) -> tuple[int, int]:
        return self._grid.get_data_parallel_rank(), self._grid.get_data_parallel_world_size()

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """See Engine.step. Every stage of a pipeline passes the same gradient_accumulation_steps micro-batches."""
        counts = self._mesh.count(micro_batches, self._task.count)
        if counts.trained == 0:
            return StepResult.of_nothing()
        set_learning_rate(self._optimizer, learning_rate)
        # stages receive all of a step's activations in the shape of the first ones (see `_rows`)
        sizes, most = self._micro_rows[self.shard[0]], most_rows(self._micro_rows)
        micro_batches = [batch.padded(max(n, 1), most) for batch, n in zip(micro_batches, sizes, strict=True)]
        # DeepSpeed averages over micro-batches and data-parallel ranks; the factor turns that into the token mean
        self._loss_factor = len(micro_batches) * self.shard[1] / counts.divisor
        contexts = self._contexts(micro_batches)
        self._dropout.queue(micro_batches)
        self._sums = torch.zeros(self._task.num_step_statistics, dtype=torch.float64, device=self.device)
        with self._dropout.check_draws():
            self._engine.train_batch(self._rows(micro_batches, contexts))
        # It keeps the time of every step, on GPUs as two CUDA events, until steps_per_print, which Accelerate sets to
        # infinity.
        self._engine.timers(TRAIN_BATCH_TIMER).reset()
        # only the last stage of each pipeline has values, so a sum over all ranks distributes them
        statistics = tuple(sum_over_ranks(self._sums.tolist(), self.device)) if self._task.num_step_statistics else ()
        guard = self._guard
        applied = not guard.refused and self._engine.was_step_applied()
        result = step_result(guard.loss, guard.grad_norm, counts.trained, applied, not guard.refused, statistics)
        return self._first_step.checked(result, learning_rate, guard.norm_with_ties)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        def measure(logits: Tensor, **targets: Tensor) -> Tensor:
            return evaluation_sums(self._task, logits, **targets)[None]

        tokens = self._mesh.count(micro_batches, self._task.count).trained
        if self._task.context is not None:
            return EvalResult(math.nan, tokens, features=self.features(micro_batches))
        loss, *statistics = self._on_last_stage(micro_batches, measure).sum(dim=0).tolist()
        return EvalResult(loss=loss / max(tokens, 1), tokens=tokens, statistics=tuple(statistics))

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        assert self._task.features is not None  # only tasks with features come here
        return self._on_last_stage(micro_batches, self._task.features).float().cpu()

    def outputs(self, batch: MicroBatch, positions: Tensor | None = None) -> Tensor | None:
        rows, length = batch.inputs["input_ids"].shape

        def flat(logits: Tensor, **_: Tensor) -> Tensor:
            return at_positions(logits, positions).reshape(rows, -1)

        outputs = self._on_last_stage([batch], flat)[:rows]  # all pipelines have computed the same rows
        outputs = outputs.view(rows, length, -1) if positions is None else outputs
        return outputs.float().cpu() if dist.get_rank() == 0 else None

    def parameters(self) -> Iterator[tuple[str, Tensor | None]]:
        def whole(name: str) -> Tensor | None:
            if self._grid.get_stage_id() != self._stages[name]:
                return None
            # gathered over the stage's data-parallel ranks if the master is sharded; None if there is no master
            master = safe_get_full_fp32_param(self._weights[name])
            return self._weights[name].detach() if master is None else master

        owners = {stage: self._grid.topology().get_rank(pipe=stage, data=0) for stage in set(self._stages.values())}
        return on_rank_0(self.shapes, self.device, lambda name: owners[self._stages[name]], whole)

    @property
    def loss_scale_state(self) -> dict:
        return deepspeed_introspection.loss_scale_state(self._engine)

    @loss_scale_state.setter
    def loss_scale_state(self, values: dict) -> None:
        deepspeed_introspection.set_loss_scale(self._engine, values)

    def memory_usage(self) -> MemoryUsage:
        return memory_usage(self._module, self._optimizer, self.describe())

    def describe(self) -> EngineDescription:
        engine, module = self._engine, self._module
        accumulated = engine.get_data_types()[1]
        return EngineDescription(
            engine=type(engine).__name__,
            **deepspeed_introspection.numbers(engine),
            world_size=dist.get_world_size(),
            dims=ParallelDims(pp=self._grid.pipe_parallel_size, dp_shard=self._grid.data_parallel_size),
            layers_per_stage=tuple(module.layers_per_stage()),
            device=str(engine.device),
            num_parameters=self._num_parameters,
            num_trained_parameters=sum(shape.numel() for shape in self.shapes.values()),
            num_parameters_per_rank=sum(weight.numel() for weight in self._weights.values()),
            activation_checkpoint_interval=module.activation_checkpoint_interval,
            weight_dtype=dtype_name(next(module.parameters()).dtype),
            accumulation_dtype=dtype_name(accumulated) if accumulated else None,
            kernels=self._kernels,
            sharded=False,
        )

    def _state(self) -> State:
        optimizer, stage = self._optimizer, self._grid.get_stage_id()
        trained = {name: weight for name, weight in self._weights.items() if name in self.shapes}
        saved = {name for name in trained if self._stages[name] == stage}  # two stages hold a tied weight; one saves
        states = state_names(self._settings, self.shapes)
        if hasattr(next(iter(trained.values())), "_hp_mapping"):
            return Zero12Shards(trained, optimizer, states, saved)
        return DTensorShards(trained, optimizer, states, self.shard, saved)

    def _on_last_stage(self, micro_batches: Sequence[MicroBatch], measure: Callable[..., Tensor]) -> Tensor:
        """Apply `measure`, (logits, **targets) -> (rows, n), to all micro-batches without an update.

        Returns (all ranks' rows, n), fp64, the same on every rank, with rank 0's rows first.
        """
        values: list[Tensor] = []

        def keep(logits: Tensor, **targets: Tensor) -> Tensor:
            values.append(measure(logits, **targets).double())
            return logits.new_zeros(())

        self._last_stage = keep
        try:
            self._engine.eval_batch(
                self._rows(micro_batches, [{}] * len(micro_batches)),
                reduce_output=None,  # pyright: ignore[reportArgumentType]  # DeepSpeed documents None
                bcast_loss=False,
                num_micro_batches=len(micro_batches),
            )
        finally:
            self._last_stage = self._weighted_loss
        rank, size = self.shard
        # only the last stage of each pipeline has values, so a sum over all ranks distributes them
        rows, width = (
            int(n) // size for n in sum_over_ranks([*torch.cat(values).shape] if values else [0, 0], self.device)
        )
        everything = torch.zeros(size, rows, width, dtype=torch.float64, device=self.device)
        if values:
            everything[rank] = torch.cat(values)
        dist.all_reduce(everything)
        return everything.flatten(0, 1)

    def _contexts(self, micro_batches: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        if self._task.context is None:
            return [{}] * len(micro_batches)
        assert self._task.momentum_queue is None  # of a task that this pipeline does not train
        module = self._module
        self._dropout.queue(micro_batches)
        module.train()  # the last pass may have been an evaluation
        module.eval = lambda: module  # DeepSpeed evaluates, but these features have to drop what the step drops
        try:
            compute = partial(self.features, micro_batches)
            return task_contexts(self._task, compute, self._micro_rows, self.shard[0], padded=True)
        finally:
            vars(module).pop("eval")

    def _rows(
        self, micro_batches: Sequence[MicroBatch], contexts: Sequence[dict[str, Tensor]]
    ) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Give micro-batches as DeepSpeed expects them: (inputs of the first stage, targets of the last stage)."""
        shape = micro_batches[0].inputs["input_ids"].shape
        if shape != self._shape:  # DeepSpeed's stages agree on it with the first micro-batch only
            self._engine.reset_activation_shape()
            self._shape = shape
        targets = [batch.targets | context for batch, context in zip(micro_batches, contexts, strict=True)]
        self._target_names = tuple(targets[0])
        inputs = map(self._first_inputs, micro_batches)  # when DeepSpeed takes them
        return zip(inputs, (tuple(values.values()) for values in targets), strict=True)

    def _first_inputs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        # only in training: a cross-batch loss (kto) also reads the rows once before, without a gradient
        if self._engine.is_first_stage() and self._last_stage == self._weighted_loss:
            self._first_step.read(batch)
        return batch.inputs["input_ids"], batch.inputs["position_ids"]

    def _loss(self, logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        return self._last_stage(logits, **dict(zip(self._target_names, targets, strict=True)))

    def _weighted_loss(self, logits: Tensor, **targets: Tensor) -> Tensor:
        loss, statistics = self._task.step_loss(logits, **targets)
        self._sums += statistics
        return loss * self._loss_factor

    def _write(self, name: str, value: Tensor) -> None:
        weight = self._weights[name]
        weight.data.copy_(value)
        if name in self.shapes:
            safe_set_full_fp32_param(weight, value.to(weight.device))


def _check_trained(stages: set[int], num_stages: int) -> None:
    """Raise ConfigurationError, on all ranks, if a stage is all frozen: DeepSpeed steps every stage's optimizer."""
    idle = ", ".join(str(stage) for stage in range(num_stages) if stage not in stages)
    if idle:
        raise ConfigurationError(
            f"pipeline.stages: found {num_stages}, but all of stage {idle} is frozen (adapter.target_modules, "
            "optimizer.groups), and DeepSpeed needs something to train in every stage; train layers in all of them, "
            "use fewer stages, or configs/pipeline_1f1b.yaml"
        )


class PipelineGuard:
    """Hook between DeepSpeed's gradient reduction and its optimizer, which refuses a non-finite step.

    By itself, DeepSpeed applies non-finite gradients in some of its optimizers, skips them silently in others, and
    ignores a non-finite loss.

    Attributes:
        loss, grad_norm: of the last step, as in StepResult.
        norm_with_ties: as grad_norm, but a weight that two stages share counts on both.
        refused: whether the last step was refused.
    """

    def __init__(self, engine: deepspeed.PipelineEngine, module: StageModule, device: torch.device):
        self.loss, self.grad_norm, self.norm_with_ties, self.refused = math.nan, math.nan, math.nan, False
        self._engine, self._module, self._device = engine, module, device
        self._optimizer: Any = engine.optimizer  # DeepSpeed's optimizers have no base class in common
        self._grow_scale = deepspeed_introspection.grow_after_step(engine)
        self._take_model_step: Callable = engine._take_model_step
        engine._take_model_step = self._step

    def _step(self, lr_kwargs: dict | None) -> None:
        self._measure()
        self.refused = not math.isfinite(self.loss) or not (
            math.isfinite(self.grad_norm) or deepspeed_introspection.may_rescale(self._engine)
        )
        if not self.refused:
            self._take_model_step(lr_kwargs)
            if self._grow_scale and self._engine.was_step_applied():
                self._grow_scale()
            return
        if isinstance(self._optimizer, DeepSpeedZeroOptimizer):  # whose zero_grad clears the weights' own only
            for index in self._optimizer.averaged_gradients:
                self._optimizer.averaged_gradients[index] = None
                self._optimizer.all_grad_tensors[index] = None
        self._optimizer.zero_grad()

    def _measure(self) -> None:
        engine = self._engine
        counted, tied = [], []  # tied weights count on the first stage
        for gradient, weight in self._gradients():
            if gradient is not None:
                (tied if weight.ds_pipe_replicated else counted).append(gradient)
        squares, loss = _squares(counted), 0.0
        if engine.is_last_stage():
            assert isinstance(engine.total_loss, Tensor)  # a list only for a loss function that returns several
            loss = engine.total_loss.item()
        loss, squares, again = sum_over_ranks([loss, squares, _squares(tied)], self._device)
        # what PipelineEngine.step multiplies by; its division by the step's tokens stays
        self.loss = loss / (engine.gradient_accumulation_steps() * engine.dp_world_size)
        scale = getattr(self._optimizer, "loss_scale", 1.0)
        self.grad_norm, self.norm_with_ties = math.sqrt(squares) / scale, math.sqrt(squares + again) / scale

    def _gradients(self) -> Iterator[tuple[Tensor | None, DeepSpeedParameter]]:
        """Yield this rank's gradients with their weights; each element on one of the stage's data-parallel ranks."""
        optimizer = self._optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer):
            for index, gradients in optimizer.averaged_gradients.items():
                real = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
                # DeepSpeed does not mark the padding behind the last weight, so `real` may have one more
                yield from zip(real, optimizer.params_in_partition[index], strict=False)
        elif self._engine.grid.get_data_parallel_rank() == 0:
            if isinstance(optimizer, BF16_Optimizer):
                for gradients, weights in zip(optimizer.fp32_groups_gradients, optimizer.bf16_groups, strict=True):
                    yield from zip(gradients, weights, strict=True)
            else:
                yield from ((weight.grad, weight) for weight in self._module.parameters())


def _squares(gradients: list[Tensor]) -> float:
    return sum_of_squares(gradients).item() if gradients else 0.0


def sum_over_ranks(values: list[float], device: torch.device, group: dist.ProcessGroup | None = None) -> list[float]:
    """Sum numbers over the ranks of a group (None: all) in fp64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return total.tolist()
