"""A momentum encoder and a queue of the embeddings that it has computed (MoCo, He et al., 2020, arXiv:1911.05722).

The encoder is a moving average of the trained weights. It is kept as one more state of each weight, in the regions in
which a rank keeps the others, and is computed with by exchanging it with the weights: so every strategy can run, save
and load it. A rank keeps 4 bytes for each trained weight of its part, and while it computes 4 more.
Where an offloaded optimizer keeps its weights on a disk, these stay in host memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samecurve.errors import ConfigurationError
from samecurve.interfaces.region import Region
from samecurve.interfaces.sharded_state import AVERAGE, FACTOR, QUEUE, WEIGHT, Kinds, Master, ShardRange, Visit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from samecurve.accelerator.mesh import Mesh
    from samecurve.interfaces.sharded_state import State
    from samecurve.interfaces.task import MomentumQueue, Task


class MomentumEncoder:
    """Implementation of interfaces.sharded_state.State: an engine's state with the momentum encoder and its queue.

    Args:
        state: the engine's, with the weights that training begins with.
        settings: Task.momentum_queue.
        width: values of an embedding, which are those of the model's hidden states.
        mesh: of all ranks; each keeps the whole queue.

    Attributes:
        num_bytes: size of this rank's averages and of the queue.
    """

    def __init__(self, state: State, settings: MomentumQueue, width: int, mesh: Mesh):
        self._state, self._momentum, self._device = state, settings.momentum, mesh.device
        self.kinds: Kinds = {
            name: (*kinds, AVERAGE) if WEIGHT in kinds else kinds for name, kinds in state.kinds.items()
        }
        self.kinds[QUEUE] = (FACTOR,)
        self.factors = {**state.factors, QUEUE: (settings.size, width)}
        self.codes: Container[tuple[str, str]] = state.codes
        self._rows = torch.zeros(settings.size, width, device=mesh.device)  # the newest embeddings are the last ones
        self._filled, self._new = 0, self._rows[:0]
        region = Region(0, self._rows.numel())
        self._range = ShardRange(QUEUE, region, region.split(mesh.rank, mesh.dims.world_size))
        self._averages = {shard.name: weight.to(torch.float32, copy=True) for shard, weight in state.weights()}
        self.num_bytes = sum(tensor.nbytes for tensor in (self._rows, *self._averages.values()))

    @classmethod
    def of(cls, task: Task, state: State, skeleton: PreTrainedModel, mesh: Mesh) -> MomentumEncoder | None:
        """Build the encoder of a task; None if it has none."""
        width = skeleton.config.get_text_config().hidden_size
        return cls(state, task.momentum_queue, width, mesh) if task.momentum_queue else None

    @property
    def queue(self) -> Tensor:
        """The newest embeddings, oldest first: (filled rows, width), fp32."""
        return self._rows[len(self._rows) - self._filled :]

    @contextmanager
    def in_place_of_the_weights(self) -> Iterator[None]:
        """Let the engine compute with the moving averages. Collective."""
        trained = {shard.name: weight.clone() for shard, weight in self._state.weights()}
        self._write(self._averages)
        self.refresh()
        try:
            yield
        finally:
            self._write(trained)
        self.refresh()  # not after an error: the other ranks may not come here

    def _write(self, values: dict[str, Tensor]) -> None:
        if self._device.type == "cuda":
            # A forward pass copies offloaded weights to the device while the host goes on.
            torch.cuda.synchronize(self._device)
        with torch.no_grad():
            for shard, weight in self._state.weights(writing=True):
                weight.copy_(values[shard.name])

    def hold(self, embeddings: Tensor) -> None:
        """Take a step's embeddings, (rows, width), which the queue gets if the step is applied.

        Raises:
            ConfigurationError: the embeddings have another width than the model's hidden states.
        """
        if embeddings.shape[1] != self._rows.shape[1]:
            raise ConfigurationError(
                f"embed.queue: the model's embeddings have {embeddings.shape[1]} values and its hidden_size is "
                f"{self._rows.shape[1]}; a queue needs a model where these are equal: set embed.queue=0, or use another"
            )
        self._new = embeddings

    @torch.no_grad()
    def update(self) -> None:
        """Follow an update of the weights: average = momentum average + (1 - momentum) weight; fill the queue."""
        for shard, weight in self._state.weights():
            self._averages[shard.name].lerp_(weight.float(), 1 - self._momentum)
        self._rows.copy_(torch.cat([self._rows, self._new])[-len(self._rows) :])
        self._filled = min(len(self._rows), self._filled + len(self._new))

    def ranges(self) -> list[ShardRange]:
        return [*self._state.ranges(), self._range]

    def visit(self, writing: bool = False) -> Visit:
        for shard, kind, tensor in self._state.visit(writing):
            yield shard, kind, tensor
            kinds = self.kinds[shard.name]
            if writing and kind == WEIGHT:  # stays so where only weights are written, as from another trainer's folder
                self._averages[shard.name].copy_(tensor)
            if AVERAGE in kinds and kind == kinds[-2]:  # after all that the engine keeps of this weight
                yield shard, AVERAGE, self._averages[shard.name]
        yield self._range, FACTOR, self._rows.view(-1)

    def weights(
        self, names: Container[str] | None = None, writing: bool = False
    ) -> Iterator[tuple[ShardRange, Tensor]]:
        return self._state.weights(names, writing)

    def finish(self, updates: int) -> None:
        self._state.finish(updates)
        self._filled = int(self._rows.any(dim=1).sum())  # no embedding is all zeros

    def refresh(self) -> None:
        self._state.refresh()

    def masters(self) -> Iterator[Master]:
        return self._state.masters()

    def replicas(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._state.replicas()
        for shard in self._state.ranges():
            if shard.name in self._averages:
                yield f"{AVERAGE}/{shard.name} from {shard.region.start}", self._averages[shard.name]
        yield QUEUE, self._rows
