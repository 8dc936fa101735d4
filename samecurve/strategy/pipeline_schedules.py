"""Pipeline schedules of torch.distributed.pipelining: where stages live and how many micro-batches a schedule takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule's division of a model over p ranks.

    Attributes:
        stages_per_rank: number of stages that each rank holds.
        folded: whether rank r holds stages r and 2p - 1 - r, so that rank 0 has the first and the last one (a V);
            otherwise stages go round: rank r holds r, r + p, ...
    """

    stages_per_rank: int = 1
    folded: bool = False

    def num_stages(self, ranks: int) -> int:
        return self.stages_per_rank * ranks

    def rank(self, stage: int, ranks: int) -> int:
        """Return the rank that holds a stage."""
        return 2 * ranks - 1 - stage if self.folded and stage >= ranks else stage % ranks

    def stages(self, rank: int, ranks: int) -> list[int]:
        """List the stages of a rank in ascending order."""
        return [rank, 2 * ranks - 1 - rank] if self.folded else list(range(rank, self.num_stages(ranks), ranks))

    def layers(self, num_layers: int, ranks: int) -> list[int]:
        """Return the number of decoder layers of every stage, which differ by at most one."""
        count = self.num_stages(ranks)
        places = Counter(layer * count // num_layers for layer in range(num_layers))
        return [places[stage] for stage in range(count)]

    def takes_recomputation(self, kind: str) -> bool:
        """Whether the schedule supports a kind of recomputation (memory.activation_checkpointing).

        A folded schedule cuts the backward pass in two (zero bubble), which PyTorch cannot do for a layer that is
        recomputed in part.
        """
        return not (self.folded and kind == "selective")


SCHEDULES = {
    "GPipe": PipelineSchedule(),
    "1F1B": PipelineSchedule(),
    "Interleaved1F1B": PipelineSchedule(2),
    "ZBVZeroBubble": PipelineSchedule(2, folded=True),
    "DualPipeV": PipelineSchedule(2, folded=True),
}
"""By PyTorch's name."""


def micro_batch_rule(name: str, num_micro_batches: int, ranks: int) -> str:
    """Say which rule of torch 2.13's schedule a number of micro-batches per step breaks; "" if none."""
    stages = SCHEDULES[name].num_stages(ranks)
    if name in ("1F1B", "DualPipeV") and num_micro_batches < stages:
        return f"at least as many as the {stages} stages"
    if name == "Interleaved1F1B" and num_micro_batches % max(1, num_micro_batches // ranks):
        return f"a multiple of {num_micro_batches // ranks}, its number of rounds"
    return ""
