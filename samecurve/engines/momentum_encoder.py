"""A momentum encoder and a queue of the embeddings that it has computed (MoCo, He et al., 2020, arXiv:1911.05722).

The encoder is a moving average of the trained weights. It is kept as one more state of each weight, in the regions in
which a rank keeps the others, and is computed with by exchanging it with the weights: so every strategy can run, save
and load it. A rank keeps 4 bytes for each trained weight of its part, and while it computes 4 more.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.interfaces.region import Region
from samecurve.interfaces.sharded_state import AVERAGE, FACTOR, QUEUE, WEIGHT, Kinds, Master, ShardRange, Visit

if TYPE_CHECKING:
    from samecurve.accelerator.mesh import Mesh
    from samecurve.interfaces.sharded_state import State
    from samecurve.interfaces.task import Momentum


class MomentumEncoder:
    """Implementation of interfaces.sharded_state.State: an engine's state with the momentum encoder and its queue.

    Args:
        state: the engine's, with the weights that training begins with.
        settings: Task.momentum.
        width: values of an embedding.
        mesh: of all ranks; each keeps the whole queue.
        refresh: makes the engine compute with weights that have just been written. Collective.

    Attributes:
        queue: (filled rows, width), fp32: the newest embeddings, oldest first.
    """

    def __init__(self, state: State, settings: Momentum, width: int, mesh: Mesh, refresh: Callable[[], None]):
        self._state, self._settings, self._refresh = state, settings, refresh
        self.kinds: Kinds = {
            name: (*kinds, AVERAGE) if WEIGHT in kinds else kinds for name, kinds in state.kinds.items()
        }
        self.kinds[QUEUE] = (FACTOR,)
        self.factors = {**state.factors, QUEUE: (settings.queue, width)}
        self.codes: Container[tuple[str, str]] = state.codes
        # rows that are not filled yet are zeros, and no embedding is
        self._rows = torch.zeros(settings.queue, width, device=mesh.device)
        self._new = self._rows[:0]
        region = Region(0, self._rows.numel())
        self._range = ShardRange(QUEUE, region, region.split(mesh.rank, mesh.dims.world_size))
        self._averages: list[Tensor] = []
        for _, kind, tensor in state.visit():
            if kind == WEIGHT:
                self._averages.append(tensor.to(torch.float32, copy=True))

    @property
    def queue(self) -> Tensor:
        return self._rows[self._rows.any(dim=1)]

    @contextmanager
    def in_place_of_the_weights(self) -> Iterator[None]:
        """Let the engine compute with the moving averages. Collective."""
        weights: list[Tensor] = []
        with torch.no_grad():
            for weight, average in self._pairs(writing=True):
                weights.append(weight.clone())
                weight.copy_(average)
        self._refreshed()
        try:
            yield
        finally:
            with torch.no_grad():
                for (weight, _), trained in zip(self._pairs(writing=True), weights, strict=True):
                    weight.copy_(trained)
        self._refreshed()  # not after an error: the other ranks may not come here

    def hold(self, embeddings: Tensor) -> None:
        """Take a step's embeddings, (rows, width), which the queue gets if the step is applied."""
        self._new = embeddings.float()

    @torch.no_grad()
    def update(self) -> None:
        """Follow an update of the weights: average = momentum average + (1 - momentum) weight; fill the queue."""
        for weight, average in self._pairs():
            average.lerp_(weight.float(), 1 - self._settings.momentum)
        self._rows.copy_(torch.cat([self._rows, self._new])[-len(self._rows) :])

    def _pairs(self, writing: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's regions of the weights, each with its average."""
        averages = iter(self._averages)
        for _, kind, tensor in self._state.visit(writing):
            if kind == WEIGHT:
                yield tensor, next(averages)

    def _refreshed(self) -> None:
        self._state.refresh()
        self._refresh()

    def ranges(self) -> list[ShardRange]:
        return [*self._state.ranges(), self._range]

    def visit(self, writing: bool = False) -> Visit:
        averages = iter(self._averages)
        for shard, kind, tensor in self._state.visit(writing):
            yield shard, kind, tensor
            kinds = self.kinds[shard.name]
            if kind == WEIGHT:
                average = next(averages)
                if writing:  # where nothing else is written, as from a checkpoint of another trainer
                    average.copy_(tensor)
            if AVERAGE in kinds and kind == kinds[-2]:
                yield shard, AVERAGE, average
        yield self._range, FACTOR, self._rows.view(-1)

    def finish(self, updates: int) -> None:
        self._state.finish(updates)

    def refresh(self) -> None:
        self._state.refresh()

    def masters(self) -> Iterator[Master]:
        return self._state.masters()

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._state.replicas()
        yield QUEUE, self._rows
