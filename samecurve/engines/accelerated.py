"""The optimizer step under the strategies that Accelerate has: one device, DDP, FSDP2 and ZeRO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samecurve.accelerator import fsdp
from samecurve.engines import teacher
from samecurve.engines.forward import Forward
from samecurve.engines.memory_usage import memory_usage
from samecurve.engines.momentum_encoder import MomentumEncoder
from samecurve.engines.step_sums import StepSums, step_result
from samecurve.errors import ConfigurationError
from samecurve.interfaces.engine import EngineDescription, EvalResult, MemoryUsage, StepResult
from samecurve.models.pretrained import constants
from samecurve.optim.schedule import set_learning_rate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.accelerator import Accelerator
    from samecurve.accelerator.mesh import Mesh
    from samecurve.config.schema import Recipe
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.engines.first_step import FirstStep
    from samecurve.interfaces.sharded_state import State
    from samecurve.interfaces.task import Task
    from samecurve.strategy.plan import Plan


class AcceleratedEngine(ABC):
    """The part of interfaces.engine.Engine that the torch and ZeRO engines have in common.

    Attributes:
        model: as Accelerate has prepared it.
        forward: its forward passes.
        tensors: what this rank keeps of each weight and buffer, by name.
        first_step: compares the first update with the recipe.
    """

    accelerator: Accelerator
    skeleton: PreTrainedModel
    tensors: dict[str, Any]
    recipe: Recipe
    task: Task
    mesh: Mesh
    shard: tuple[int, int]
    model: Any
    optimizer: Any
    forward: Forward
    first_step: FirstStep
    state: State

    def _accumulate_as(self, plan: Plan) -> None:
        """Let Accelerate count the micro-batches of this plan's steps. One Accelerator may serve several engines."""
        accelerator = self.accelerator
        accelerator.gradient_accumulation_steps = plan.recipe.batch.accumulation_steps(self.shard[1])
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = not fsdp.reduces_once(plan)
        accelerator.step = 0

    def _build_forward(self, plan: Plan, **parts: Any) -> Forward:
        """Build the forward passes of the prepared model. `parts`: the other attributes of Forward."""
        # the weights have their values now
        encoder = MomentumEncoder.of(self.task, self.state, self.skeleton, self.mesh)
        self.state = encoder or self.state
        buffers = constants(self.skeleton).difference(name for name, _ in self.skeleton.named_parameters())
        self._constants = {name: self.tensors[name].clone() for name in buffers}
        return Forward(
            self.accelerator,
            self.mesh,
            self.model,
            self.task,
            teacher=teacher.build(self.accelerator, plan, self.mesh, self.task) if self.task.teacher else None,
            rows=self.recipe.batch.micro_batches(self.shard[1]),
            first_step=self.first_step,
            momentum_encoder=encoder,
            **parts,
        )

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        accelerator, forward = self.accelerator, self.forward
        assert len(micro_batches) == accelerator.gradient_accumulation_steps, "the loop's batch is not the recipe's"
        set_learning_rate(self.optimizer, learning_rate)
        counts = forward.count(micro_batches)  # over all ranks
        if counts.trained == 0:
            return StepResult.of_nothing()
        scale = self._loss_scale()
        sums = StepSums(forward.mesh, self.task.num_step_statistics, forward.router)
        for batch, context, is_last in forward.with_contexts(micro_batches, counts):
            with accelerator.accumulate(self.model):  # defers the reduction of gradients where that pays
                loss, statistics = forward.loss(batch, context)
                sums.add(loss, statistics)
                finite = (
                    sums.nan_unless_finite() if is_last else 1.0
                )  # nan where the step's loss is not finite: nothing is updated
                # a sum, divided by the trained tokens (or their weights) of the step: of all micro-batches and ranks
                accelerator.backward(loss * scale * finite, reduction="sum", num_items=counts.divisor)
        finish_read, may_rescale = sums.start_read(), self._may_rescale()
        self._complete_gradients()
        grad_norm = float(accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.max_grad_norm))
        applied = self._update(grad_norm)
        if applied and forward.momentum_encoder is not None:
            forward.momentum_encoder.update()
        finish_read()
        mean = sums.loss / counts.divisor
        result = step_result(mean, grad_norm, counts.trained, applied, may_rescale, sums.statistics, sums.router)
        if not self.first_step.is_over:
            result = self.first_step.checked(result, learning_rate)
            if self.first_step.is_over:
                self._check_constants()
        return result

    def _check_constants(self) -> None:
        """Raise ConfigurationError on all ranks if a step has changed a buffer that exports copy. Collective.

        Layers could learn by it other than by gradients, and only parameters are in checkpoints.
        """
        live = dict(getattr(self.model, "module", self.model).named_buffers())
        moved = [not bool(((value == live[name]) | (value != value)).all()) for name, value in self._constants.items()]
        counts = self.first_step.add(torch.tensor([float(one) for one in moved], dtype=torch.float64)) if moved else ()
        names = [name for name, count in zip(self._constants, counts, strict=True) if count]
        if names:
            raise ConfigurationError(
                f"model: the first step changed a buffer of this {self.skeleton.config.model_type} ({names[0]}, "
                f"{len(names)} in all), so that the model learns by a rule of its own; here only gradients change a "
                "model, and neither checkpoints nor an export would contain the change. Use another model_type"
            )

    def _loss_scale(self) -> float:
        """fp16's loss scale by which this engine multiplies losses."""
        return 1.0

    @abstractmethod
    def _may_rescale(self) -> bool:
        """Whether a smaller fp16 loss scale may cure an overflow. Called before the update, which lowers the scale."""

    @abstractmethod
    def _complete_gradients(self) -> None:
        """Add to the gradients what `backward` has not added, and divide them by fp16's loss scale."""

    @abstractmethod
    def _update(self, grad_norm: float) -> bool:
        """Update the weights unless the norm is not finite; return whether they were. Gradients are zero afterwards."""

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        return self.forward.evaluate(micro_batches)

    def features(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return self.forward.features(micro_batches)

    def outputs(self, batch: MicroBatch, positions: torch.Tensor | None = None) -> Tensor | None:
        return self.forward.outputs(batch, positions)

    def memory_usage(self) -> MemoryUsage:
        return memory_usage(self.model, self.optimizer, self.describe(), self.forward.momentum_encoder)

    @abstractmethod
    def describe(self) -> EngineDescription: ...
