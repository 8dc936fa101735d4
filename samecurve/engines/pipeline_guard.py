"""Gradient norm of a pipeline, and the refusal of a step that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch import distributed as dist

from samecurve.accelerator import deepspeed_introspection
from samecurve.accelerator.sharded_state import DeepSpeedParameter
from samecurve.optim.norms import sum_of_squares

if TYPE_CHECKING:
    from samecurve.engines.pipeline_stage import StageModule


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
