"""The router loss of a step, see losses/router.py: normalised over the global batch, beside the task's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from samecurve.errors import ConfigurationError
from samecurve.losses import router
from samecurve.models import routers
from samecurve.specs.environment import version

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.mesh import Mesh
    from samecurve.config.schema import Recipe
    from samecurve.data.micro_batch import Counts, MicroBatch


class RouterLoss:
    """Router loss of the steps of one engine.

    Args:
        recorder: records the model's routers.
        mesh: over which sums are taken.
    """

    def __init__(self, settings: routers.RouterSettings, recorder: routers.RouterRecorder, mesh: Mesh):
        self._settings, self._recorder, self._mesh = settings, recorder, mesh

    def begin(
        self, micro_batches: Sequence[MicroBatch], counts: Counts, forward: Callable[[MicroBatch], object]
    ) -> None:
        """Set what a step's router loss is divided by. Collective.

        Args:
            micro_batches: of this rank, on the CPU.
            counts: of the whole step.
            forward: runs the model's layers on a micro-batch. The loss over the global batch needs the counts of the
                whole step first, so it costs one more forward pass without gradients, as gradient caching does.
        """
        self._num_sequences, self._trained = counts.sequences, counts.divisor
        self._places = counts.tokens * self._recorder.num_routers
        self._counts: Tensor | None = None
        if self._settings.kind == "batch":
            counts_of_batches = []
            for batch in micro_batches:
                with torch.no_grad(), self._recorder.recording():
                    forward(batch)
                counts_of_batches.append(self._routing(batch).counts.double().sum(dim=(0, 1)))
            # tokens of the whole step that choose an expert: (experts,)
            self._counts = self._mesh.total(torch.stack(counts_of_batches).sum(dim=0))
        self._sums_of_batches: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the routers in the body, the forward pass of one micro-batch with gradients."""
        with self._recorder.recording():
            yield

    def gradient_term(self, batch: MicroBatch) -> Tensor:
        """Return a scalar 0 whose gradient is that of the recorded micro-batch's share of the router loss.

        The value is 0 so that the reported loss stays the task's. The share is multiplied by the step's trained tokens,
        because the engine divides it by them, together with the task's loss.
        """
        routing, settings = self._routing(batch), self._settings
        if self._counts is None:
            balance = router.sum_over_sequences(routing) / self._num_sequences
        else:
            balance = router.share_of_batch(routing, self._counts, self._places)
        z_loss = routing.squares / self._places
        sums = torch.stack([balance, z_loss]).detach().double()
        self._sums_of_batches.append(torch.cat([sums, routing.counts.double().sum(dim=1).flatten()]))
        whole = (settings.coefficient * balance + settings.z_coefficient * z_loss) * self._trained
        return whole - whole.detach()

    def sums(self) -> Tensor:
        """Return this rank's sums for `metrics`, 1-D fp64 on the device. Call after the step's last forward pass."""
        return torch.stack(self._sums_of_batches).sum(dim=0)

    def metrics(self, sums: Sequence[float]) -> dict[str, float | list[float]]:
        """Compute the values of the step's line of metrics.jsonl from the `sums` of all ranks."""
        balance, z_loss, *chosen = sums
        counts = np.array(chosen).reshape(self._recorder.num_routers, -1)
        shares = counts / counts.sum(axis=1, keepdims=True)
        metrics: dict[str, float | list[float]] = {"router_loss": balance}
        if self._settings.z_coefficient:
            metrics["router_z_loss"] = z_loss
        return metrics | {"expert_share_max": shares.max().item(), "expert_share": shares.mean(axis=0).tolist()}

    def _routing(self, batch: MicroBatch) -> router.Routing:
        logits = self._recorder.take()
        mask = batch.real_tokens().to(logits[0].device, non_blocking=True)
        if any(layer.shape[:-1].numel() != mask.numel() for layer in logits):  # a jamba's, in transformers 5.17
            raise ConfigurationError(
                f"model.router_loss: transformers {version('transformers')} gives router logits of "
                f"{[*logits[0].shape]} for {mask.numel()} tokens; install a later one, or set model.router_loss to off"
            )
        return router.routing(logits, mask, self._settings.top_k)


def install(recipe: Recipe, model: PreTrainedModel, mesh: Mesh) -> RouterLoss | None:
    """Install the recorder in `model` before a strategy wraps it; None if the model has no router loss.

    Raises:
        ConfigurationError: as routers.settings.
    """
    settings = routers.settings(recipe.model.router_loss, model)
    return settings and RouterLoss(settings, routers.RouterRecorder(model), mesh)
