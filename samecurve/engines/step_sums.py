"""Figures that a step reports, kept on the device until one read: each read waits for all queued kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.accelerator.mesh import copy_to_host
from samecurve.interfaces.engine import StepResult

if TYPE_CHECKING:
    from samecurve.accelerator.mesh import Mesh
    from samecurve.engines.router_loss import RouterLoss


class StepSums:
    """Sums over the micro-batches and ranks of one step.

    Call `add` for each micro-batch, `nan_unless_finite` once after the last of them, and `start_read` once.

    Attributes:
        loss, statistics, router: as in StepResult, but the loss is a sum; known after the read.
    """

    def __init__(self, mesh: Mesh, num_statistics: int, router: RouterLoss | None):
        self._mesh, self._router, self._num_statistics = mesh, router, num_statistics
        self._loss = torch.zeros((), device=mesh.device)
        self._statistics = torch.zeros(num_statistics, dtype=torch.float64, device=mesh.device)
        self._total = torch.zeros(0)
        self.loss, self.statistics = math.nan, ()
        self.router: dict[str, float | list[float]] = {}

    def add(self, loss: Tensor, statistics: Tensor) -> None:
        """Add a micro-batch's loss, a scalar, and its statistics, see Task.step_loss."""
        self._loss += loss.detach()
        self._statistics += statistics

    def nan_unless_finite(self) -> Tensor:
        """Sum over the ranks and return the factor of the last micro-batch's loss. Collective.

        Returns:
            An fp32 scalar: 1, or nan if the step's loss is not finite. A loss can overflow although its gradient is
            finite; nan makes every engine skip the update.
        """
        parts = [self._loss.double().reshape(1), self._statistics]
        parts += [self._router.sums()] if self._router else []
        self._total = self._mesh.total(torch.cat(parts))
        return torch.where(self._total[0].isfinite(), 1.0, math.nan)

    def start_read(self) -> Callable[[], None]:
        """Start to copy the sums to the host; the returned function waits for that copy and sets the attributes."""
        copied = copy_to_host(self._total)

        def read() -> None:
            self.loss, *values = copied()
            self.statistics, routed = tuple(values[: self._num_statistics]), values[self._num_statistics :]
            self.router = self._router.metrics(routed) if self._router else {}

        return read


def step_result(
    loss: float,
    grad_norm: float,
    tokens: int,
    applied: bool,
    may_rescale: bool,
    statistics: tuple[float, ...] = (),
    router: Mapping[str, float | list[float]] = MappingProxyType({}),
) -> StepResult:
    """Build the result of a step with trained tokens, by one refusal rule for all engines.

    See StepResult for the other arguments.

    Args:
        may_rescale: True if a non-finite gradient may just exceed fp16's range, so that a smaller loss scale can cure
            the overflow.
    """
    refused = ""
    if not math.isfinite(loss):
        refused = f"the loss is {loss}"
    elif not applied and not may_rescale:
        refused = f"the gradient norm is {grad_norm} at a loss of {loss:.6g}"
    return StepResult(loss, grad_norm, tokens, applied, refused, statistics, router)
