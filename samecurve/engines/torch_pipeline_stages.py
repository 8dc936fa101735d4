"""One rank's stages of a pipeline, in a mesh with replicas or shards of them, and a forward pass through all stages."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from samecurve.accelerator import fsdp
from samecurve.data.micro_batch import position_ids
from samecurve.errors import ConfigurationError
from samecurve.losses.chunked_cross_entropy import HeadReduction, Measure, TokenSums
from samecurve.losses.token_log_probabilities import LabelLogProbabilities
from samecurve.models.pipeline_split import Decoder, HeadLayer, Layer, TiedHead, last_scores
from samecurve.specs.environment import dated
from samecurve.strategy.timetables import SCHEDULES

if TYPE_CHECKING:
    from samecurve.accelerator.mesh import Mesh
    from samecurve.data.micro_batch import MicroBatch
    from samecurve.strategy.plan import Strategy


@dataclass(frozen=True)
class HeadChunks:
    """What the last stage returns instead of logits, computed in chunks of tokens.

    Attributes:
        training: the sums that it returns in training, see TokenSums; None: the labels' log-probabilities, always.
        evaluation: the sums that it returns in an evaluation.
    """

    training: Measure | None = None
    evaluation: Measure | None = None

    @property
    def has_sums(self) -> bool:
        return self.training is not None

    def of(self, labels: Tensor, weights: Tensor | None, is_training: bool) -> HeadReduction:
        """Return what the head is to compute of a micro-batch."""
        measure = self.training if is_training else self.evaluation
        targets = {"labels": labels} | ({} if weights is None else {"weights": weights})
        return LabelLogProbabilities(labels) if measure is None else TokenSums(measure, targets)


class StageLayers(nn.Module):
    """Consecutive layers; stages pass on hidden states alone, because each of them reads the position_ids itself."""

    def __init__(self, layers: list[Layer], autocast: torch.dtype | None, chunks: HeadChunks | None):
        super().__init__()
        self.layers, self._autocast, self._chunks = nn.ModuleList(layers), autocast, chunks

    def forward(
        self, hidden: Tensor, position_ids: Tensor, labels: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Compute hidden states; on the last stage logits or, with `labels`, what HeadChunks say.

        Args:
            hidden: (micro_batch_size, sequence_length, hidden_size); on the first stage input_ids without hidden_size.
            position_ids: (micro_batch_size, sequence_length).
            labels: (micro_batch_size, sequence_length), where the stages have HeadChunks.
            weights: of the labels, as they, in a training with weights.
        """
        flow = hidden, position_ids
        options = {}
        if labels is not None and self._chunks:
            options["sums"] = self._chunks.of(labels, weights, self.training)
        with torch.autocast(hidden.device.type, self._autocast) if self._autocast else nullcontext():
            for layer in self.layers:
                flow = layer(flow, **(options if isinstance(layer, (HeadLayer, TiedHead)) else {}))
        return flow[0] if isinstance(flow, tuple) else flow


class LocalStages:
    """This rank's stages, on the device with uninitialized weights.

    Attributes:
        name: the schedule's name.
        pipelines: the ranks of each pipeline, in the order of the pipeline.
        peers, group: the ranks of this rank's pipeline, and their process group.
        rank, ranks: this rank's place among its peers, and their number.
        count: the number of stages, of which a rank may have several.
        modules: this rank's stages by index, in ascending order.
        owner: the stage of every weight of the model by Hugging Face name; a tied weight's is the first one.
        weights: this rank's weights by Hugging Face name.
        classifier_padding: the padding token of a classifier, None for other models.
        tied: names of the weights that both the first and the last stage have, on different ranks.
        layers_per_stage: of all stages.

    Raises:
        ConfigurationError: a stage would have no decoder layer, or two sharded stages of a rank one weight.
    """

    def __init__(
        self,
        layers: list[Layer],
        strategy: Strategy,
        autocast: torch.dtype | None,
        mesh: Mesh,
        chunks: HeadChunks | None = None,
        classifier_padding: int | None = None,
    ):
        self.classifier_padding = classifier_padding
        self.name, self.ranks = strategy.schedule, strategy.dims.pp
        self.schedule = SCHEDULES[self.name]
        self.count, self.device = self.schedule.num_stages(self.ranks), mesh.device
        self.group = mesh.group("pp")  # NCCL adds a communicator for each two ranks that send to each other
        self.pipelines = mesh.dims.groups("pp")
        self.peers = next(group for group in self.pipelines if mesh.rank in group)
        self.rank = self.peers.index(mesh.rank)
        stages = _cut(layers, self.count, strategy)
        self._is_trained = any(weight.requires_grad for layer in layers for weight in layer.parameters())
        self.layers_per_stage = tuple(map(len, stages))
        self.owner: dict[str, int] = {}
        names = [dict(pair for layer in stage for pair in layer.named_weights()).keys() for stage in stages]
        for stage, names_of_stage in enumerate(names):
            for name in names_of_stage:
                self.owner.setdefault(name, stage)
        apart = self.rank_of(0) != self.rank_of(self.count - 1)
        shared = names[0] & names[-1]
        self.tied, self.is_sharded = shared if apart else set(), mesh.dims.dp_shard > 1
        if self.is_sharded and shared and not apart:
            raise ConfigurationError(
                f"{strategy.path}: distributed_type: FSDP2 cannot share the tied embedding between two stages of one "
                f"rank ({dated('torch')}), and {self.name} puts the first and the last stage on one; set "
                "model.config.tie_word_embeddings to false, or take a schedule without a V (GPipe, 1F1B, "
                "Interleaved1F1B)"
            )
        mine = self.schedule.stages(self.rank, self.ranks)
        self.modules = {stage: self._allocated(StageLayers(stages[stage], autocast, chunks), mesh) for stage in mine}
        self.weights = dict(pair for stage in mine for layer in stages[stage] for pair in layer.named_weights())
        self.has_first, self.has_last = 0 in mine, self.count - 1 in mine

    def _allocated(self, module: StageLayers, mesh: Mesh) -> StageLayers:
        """Shard a stage on the meta device, as FSDP2 units of one layer each, then allocate its weights."""
        if self.is_sharded:
            # trained stages are gathered once per step; a teacher has no backward pass to stay gathered for
            options: dict[str, Any] = {"mesh": mesh.sharding, "reshard_after_forward": not self._is_trained}
            for layer in module.layers:
                if isinstance(layer, Decoder):
                    fully_shard(layer, **options)
            fully_shard(module, **options)
        return module.to_empty(device=self.device)

    def rank_of(self, stage: int) -> int:
        """Return the place of a stage's rank in the pipeline."""
        return self.schedule.rank(stage, self.ranks)

    def global_rank(self, stage: int) -> int:
        """Return the rank of a stage of this pipeline among all processes."""
        return self.peers[self.rank_of(stage)]

    def group_of_ends(self) -> dist.ProcessGroup:
        """Make a group of the first and the last rank of this pipeline. Collective over all processes."""
        ends = [self.rank_of(stage) for stage in (0, self.count - 1)]
        # torch requires that every process takes part in making every group, also one that it is not in
        groups: list[Any] = [dist.new_group([ranks[end] for end in ends]) for ranks in self.pipelines]
        return groups[self.pipelines.index(self.peers)]

    def sender(self, name: str) -> int:
        """Return the rank of the first pipeline that owns a weight, by Hugging Face name."""
        return self.pipelines[0][self.rank_of(self.owner[name])]

    def whole(self, name: str) -> Tensor | None:
        """Return a weight in fp32, collectively gathered over the ranks that own its stage; None on all others."""
        if self.owner[name] not in self.modules:
            return None
        weight = self.weights[name].detach().float()
        return weight.full_tensor() if isinstance(weight, DTensor) else weight

    def trained(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """List the weights with a gradient that this rank's stages own, and those that another rank owns."""
        own: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in self.weights.items():
            if weight.grad is not None:
                (own if self.owner[name] in self.modules else others).append(weight)
        return own, others

    def forward(self, batch: MicroBatch, hidden_size: int, labels: Tensor | None = None) -> Tensor | None:
        """Pass rows through all stages without a gradient. Collective.

        Returns:
            On the rank of the last stage what the model returns (logits, a classifier's scores, hidden states), or
            sums, see StageLayers; None elsewhere.
        """
        input_ids, position_ids = inputs(batch)
        hidden = input_ids
        with torch.no_grad():
            for stage in range(self.count):
                if stage not in self.modules:
                    continue
                before, after = self.rank_of(max(stage - 1, 0)), self.rank_of(min(stage + 1, self.count - 1))
                if before != self.rank:
                    hidden = torch.empty(*input_ids.shape, hidden_size, device=self.device)
                    dist.recv(hidden, self.peers[before], group=self.group)
                hidden = self.modules[stage](hidden, position_ids, labels)
                if after != self.rank:
                    # fp32, as the receiver has allocated
                    dist.send(hidden.float().contiguous(), self.peers[after], group=self.group)
        for module in self.modules.values():
            fsdp.reshard(module)  # gathered weights would outlive an update
        return self.read_out(hidden, batch) if self.has_last else None

    def read_out(self, outputs: Tensor, batch: MicroBatch) -> Tensor:
        """Reduce the last stage's outputs to what the model returns: a classifier's scores are those of one token."""
        if self.classifier_padding is None:
            return outputs
        return last_scores(outputs, batch.inputs["input_ids"], self.classifier_padding)


def inputs(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's input_ids and position_ids, (sequences, sequence_length) each."""
    return batch.inputs["input_ids"], position_ids(batch.inputs)


def _cut(layers: list[Layer], count: int, strategy: Strategy) -> list[list[Layer]]:
    """Divide decoder layers evenly; what is before them goes to the first stage, what is behind to the last."""
    num_decoders = sum(isinstance(layer, Decoder) for layer in layers)
    if num_decoders < count:
        fix = "use a smaller size"
        if count > strategy.dims.pp:
            fix += ", or a schedule with one stage per rank (GPipe, 1F1B)"
        raise ConfigurationError(
            f"{strategy.path}: parallelism_config.parallelism_config_pp_size: {strategy.schedule} on "
            f"{strategy.dims.pp} ranks has {count} stages, but the model has {num_decoders} layers; {fix}"
        )
    ends = list(accumulate(SCHEDULES[strategy.schedule].layers(num_decoders, strategy.dims.pp)))
    stages: list[list[Layer]] = [[] for _ in range(count)]
    passed = 0
    for layer in layers:
        stages[min(bisect_right(ends, passed), count - 1)].append(layer)
        passed += isinstance(layer, Decoder)
    return stages
