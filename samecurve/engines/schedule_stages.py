"""One rank's stages of a pipeline, with a forward pass through all stages for evaluation."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samecurve.errors import ConfigurationError
from samecurve.models.pipeline_split import Decoder, Layer
from samecurve.strategy.pipeline_schedules import SCHEDULES

if TYPE_CHECKING:
    from samecurve.strategy.plan import Strategy


class StageModule(nn.Module):
    """Consecutive layers; stages pass on hidden states alone, because each of them reads the position_ids itself."""

    def __init__(self, layers: list[Layer], autocast: torch.dtype | None):
        super().__init__()
        self.layers, self._autocast = nn.ModuleList(layers), autocast

    def forward(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Compute hidden states, or logits on the last stage.

        Args:
            hidden: (micro_batch_size, sequence_length, hidden_size); on the first stage input_ids without hidden_size.
            position_ids: (micro_batch_size, sequence_length).
        """
        flow = hidden, position_ids
        with torch.autocast(hidden.device.type, self._autocast) if self._autocast else nullcontext():
            for layer in self.layers:
                flow = layer(flow)
        return flow[0] if isinstance(flow, tuple) else flow


class Stages:
    """This rank's stages, on the device with uninitialized weights.

    Attributes:
        name: the schedule's.
        modules: this rank's stages by index, in ascending order.
        owner: the stage of every weight of the model by Hugging Face name; a tied weight's is the first one.
        weights: this rank's weights by Hugging Face name.
        tied: names of the weights that both the first and the last stage have, on different ranks.
        layers_per_stage: of all stages.

    Raises:
        ConfigurationError: a stage would have no decoder layer.
    """

    def __init__(self, layers: list[Layer], strategy: Strategy, autocast: torch.dtype | None, device: torch.device):
        self.name, self.ranks = strategy.pipeline_schedule, strategy.pipeline_stages
        self.schedule = SCHEDULES[self.name]
        self.count, self.rank, self.device = self.schedule.num_stages(self.ranks), dist.get_rank(), device
        stages = _cut(layers, self.count, strategy)
        self.layers_per_stage = tuple(map(len, stages))
        self.owner: dict[str, int] = {}
        names = [dict(pair for layer in stage for pair in layer.named_weights()).keys() for stage in stages]
        for stage, found in enumerate(names):
            for name in found:
                self.owner.setdefault(name, stage)
        apart = self.rank_of(0) != self.rank_of(self.count - 1)
        self.tied = names[0] & names[-1] if apart else set()
        mine = self.schedule.stages(self.rank, self.ranks)
        self.modules = {stage: StageModule(stages[stage], autocast).to_empty(device=device) for stage in mine}
        self.weights = dict(pair for stage in mine for layer in stages[stage] for pair in layer.named_weights())
        self.has_first, self.has_last = 0 in mine, self.count - 1 in mine

    def rank_of(self, stage: int) -> int:
        return self.schedule.rank(stage, self.ranks)

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """List the gradients of the weights that this rank's stages own, and of those that another rank owns."""
        own: list[Tensor] = []
        others: list[Tensor] = []
        for name, weight in self.weights.items():
            if weight.grad is not None:
                (own if self.owner[name] in self.modules else others).append(weight.grad)
        return own, others

    def forward(self, input_ids: Tensor, position_ids: Tensor, hidden_size: int) -> Tensor | None:
        """Pass rows through all stages without a gradient. Collective.

        Returns:
            Logits (rows, sequence_length, vocabulary_size) on the rank of the last stage, None elsewhere.
        """
        hidden = input_ids
        with torch.no_grad():
            for stage in range(self.count):
                if stage not in self.modules:
                    continue
                before, after = self.rank_of(max(stage - 1, 0)), self.rank_of(min(stage + 1, self.count - 1))
                if before != self.rank:
                    hidden = torch.empty(*input_ids.shape, hidden_size, device=self.device)
                    dist.recv(hidden, before)
                hidden = self.modules[stage](hidden, position_ids)
                if after != self.rank:
                    dist.send(hidden.float().contiguous(), after)
        return hidden if self.has_last else None


def _cut(layers: list[Layer], count: int, strategy: Strategy) -> list[list[Layer]]:
    """Divide decoder layers evenly; what is before them goes to the first stage, what is behind to the last."""
    num_decoders = sum(isinstance(layer, Decoder) for layer in layers)
    if num_decoders < count:
        raise ConfigurationError(
            f"{strategy.path}: parallelism_config.parallelism_config_pp_size: {strategy.pipeline_schedule} on "
            f"{strategy.pipeline_stages} ranks has {count} stages, but the model has {num_decoders} layers; use a "
            "smaller size, or a schedule with one stage per rank (GPipe, 1F1B)"
        )
    ends = list(accumulate(SCHEDULES[strategy.pipeline_schedule].layers(num_decoders, strategy.pipeline_stages)))
    stages: list[list[Layer]] = [[] for _ in range(count)]
    passed = 0
    for layer in layers:
        stages[min(bisect_right(ends, passed), count - 1)].append(layer)
        passed += isinstance(layer, Decoder)
    return stages
