"""Each pipeline rank's order of work under PyTorch's schedules, and how long ranks of any schedule wait.

The work of a micro-batch on a stage is one unit of time each for F, the forward pass, I, the input's gradient, and W,
the weights' gradients; B is I and W at once (arXiv:2401.10241, section 2). Stages take equally long, and messages no
time. A schedule does not look at times: the order is fixed, and a rank waits until its next work can begin.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class Pass(NamedTuple):
    """One micro-batch's part of a stage. kind: F, I, W or B."""

    stage: int
    kind: str
    micro_batch: int

    @property
    def range(self) -> str:
        """Its name in a profile, read by `Pass.of_range`."""
        return f"stage {self.stage}: {self.kind} {self.micro_batch}"

    @classmethod
    def of_range(cls, name: str) -> Pass | None:
        match = re.fullmatch(r"stage (\d+): ([FBIW]) (\d+)", name)
        return cls(int(match[1]), match[2], int(match[3])) if match else None


class ScheduleRun(NamedTuple):
    """A step of a schedule on one rank of a pipeline."""

    schedule: str
    rank: int
    ranks: int
    micro_batches: int

    @property
    def range(self) -> str:
        """Its name in a profile, read by `ScheduleRun.of_range`."""
        return f"{self.schedule}: rank {self.rank} of {self.ranks}, {self.micro_batches} micro-batches"

    @classmethod
    def of_range(cls, name: str) -> ScheduleRun | None:
        match = re.fullmatch(r"(\w+): rank (\d+) of (\d+), (\d+) micro-batches", name)
        return cls(match[1], *map(int, match.groups()[1:])) if match else None


Entry = tuple[Pass, ...]
"""What a rank does before it hands anything on: one pass, or a forward beside a backward pass (DualPipeV)."""


class _Order:
    """Builds the order of one rank; every kind of work of a stage takes the micro-batches in turn."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._passed: Counter[tuple[int, bool]] = Counter()
        self._cut: deque[tuple[int, int]] = deque()

    def add(self, *parts: tuple[str, int]) -> None:
        """Append an entry of (kind, stage) parts."""
        entry = []
        for kind, stage in parts:
            # B and I have one count: a micro-batch goes back through a stage by one of them.
            number = self._passed[stage, kind == "F"]
            self._passed[stage, kind == "F"] += 1
            if kind == "I":
                self._cut.append((stage, number))
            entry.append(Pass(stage, kind, number))
        self.entries.append(tuple(entry))

    def repeat(self, times: int, *parts: tuple[str, int]) -> None:
        """Append each part as an entry of its own, one after the other, again and again."""
        for _ in range(times):
            for kind, stage in parts:
                if kind == "W":
                    self.weights(stage)
                else:
                    self.add((kind, stage))

    def weights(self, stage: int | None = None) -> None:
        """Append W of the oldest I that waits for it, of one stage if given; nothing if none waits."""
        oldest = next((cut for cut in self._cut if stage in (None, cut[0])), None)
        if oldest:
            self._cut.remove(oldest)
            self.entries.append((Pass(oldest[0], "W", oldest[1]),))

    def passed(self, kind: str, stage: int) -> int:
        return self._passed[stage, kind == "F"]


def _gpipe(rank: int, ranks: int, count: int) -> list[Entry]:
    order = _Order()
    order.repeat(count, ("F", rank))
    order.repeat(count, ("B", rank))
    return order.entries


def _alternating(
    order: _Order, ahead: int, total: int, forward: Callable[[int], int], back: Callable[[int], int]
) -> list[Entry]:
    """Some forward passes first, then F and B in turn. forward, back: the stage of the n-th pass of its direction."""
    for number in range(total + ahead):
        if number < total:
            order.add(("F", forward(number)))
        if number >= ahead:
            order.add(("B", back(number - ahead)))
    return order.entries


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> list[Entry]:
    return _alternating(_Order(), min(ranks - 1 - rank, count), count, lambda _: rank, lambda _: rank)


def _interleaved(rank: int, ranks: int, count: int) -> list[Entry]:
    """Each stage of a rank takes a round of micro-batches before the next one does (arXiv:2104.04473, section 2.2)."""
    chunks = SCHEDULES["Interleaved1F1B"].stages_per_rank
    size = count // max(1, count // ranks)  # micro-batches of a round, as PyTorch divides them
    ahead = min((chunks - 1) * size + 2 * (ranks - 1 - rank), chunks * count)
    return _alternating(
        _Order(),
        ahead,
        chunks * count,
        lambda number: number // size % chunks * ranks + rank,
        lambda number: (chunks - 1 - number // size % chunks) * ranks + rank,
    )


def _zero_bubble_v(rank: int, ranks: int, count: int) -> list[Entry]:
    """ZB-V (arXiv:2401.10241, section 6), of at least 2 p - 1 micro-batches; those that do not exist are left out."""
    order, down, up = _Order(), rank, 2 * ranks - 1 - rank
    total = max(2 * ranks - 1, count)
    backward_down, backward_up = (("I", down), ("W", down)), (("I", up), ("W", up))
    order.repeat(2 * (ranks - rank) - 1, ("F", down))  # until the first micro-batch comes back up the V
    order.repeat(rank, ("F", up), ("F", down))
    order.repeat(ranks - rank, ("F", up), *backward_up)
    steady = total - order.passed("F", down)
    order.repeat(steady, ("F", down), *backward_down, ("F", up), *backward_up)
    order.repeat(total - order.passed("F", up), *backward_down, ("F", up), *backward_up)
    # other ranks wait for I, but none for W, which fills the gaps
    order.repeat(rank, ("I", down), ("I", up))
    order.repeat(ranks - rank, ("I", down), ("W", down))
    order.repeat(total, ("W", up))
    order.repeat(total, ("W", down))
    return [entry for entry in order.entries if entry[0].micro_batch < count]


def _dual_pipe_v(rank: int, ranks: int, count: int) -> list[Entry]:
    """DualPipe (arXiv:2412.19437, section 3.2.1) folded into a V, in the eight steps of its authors' code."""
    order, down, up = _Order(), rank, 2 * ranks - 1 - rank
    behind = ranks - rank - 1
    order.repeat(2 * behind, ("F", down))
    order.repeat(rank + 1, ("F", down), ("F", up))
    order.repeat(behind, ("I", up), ("W", up), ("F", up))
    for number in range(count - 2 * ranks + rank + 1):
        if number == 0 and behind == 0:
            # PyTorch does not overlap these two, for a smaller bubble
            order.add(("F", down))
            order.add(("B", up))
        else:
            order.add(("F", down), ("B", up))
        order.add(("F", up), ("B", down))
    for _ in range(behind):
        order.add(("B", up))
        order.add(("F", up), ("B", down))
    half = rank + 1  # of the backward passes are whole, the others cut in two
    for number in range(2 * (rank + 1)):
        order.add(("I" if number >= half else "B", down if number % 2 else up))
    for _ in range(behind):
        order.weights()
        order.add(("I", down))
    for _ in range(rank + 1):
        order.weights()
    return order.entries


_ORDERS = {
    "GPipe": _gpipe,
    "1F1B": _one_forward_one_backward,
    "Interleaved1F1B": _interleaved,
    "ZBVZeroBubble": _zero_bubble_v,
    "DualPipeV": _dual_pipe_v,
}


def order(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Entry]:
    """List a rank's work in PyTorch's order.

    Args:
        schedule: a key of SCHEDULES, with a number of micro-batches that it takes (micro_batch_rule).
    """
    return _ORDERS[schedule](rank, ranks, micro_batches)


ZERO_BUBBLE_SHARE = {"zb-1p": 1 / 3, "zb-2p": 0.0}  # of 1F1B's idle slots (arXiv:2401.10241)


def idle_slots(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the idle time of a rank in units of one micro-batch's forward and backward of its whole stage.

    Stages of equal time and free communication are assumed. For a 1.5B model on 8 stages, published idle shares of 1F1B
    are 24.3, 19.9 and 12.4 % with 24, 32 and 64 micro-batches (arXiv:2401.10241, table 4); the formula gives 22.6, 17.9
    and 9.9 %, that is, 1.7, 2.0 and 2.5 points too few. PyTorch's schedules wait as long as a
    walk through their order of work does (test_timetables.py).

    Args:
        schedule: a key of SCHEDULES or ZERO_BUBBLE_SHARE, or "gpipe", "1f1b" or "interleaved".
        stages: number of ranks along the pipeline (p).
        micro_batches: of a step, per data-parallel rank (m).
        chunks: stages of each rank (v), for interleaved schedules.
    """
    waits = stages - 1
    if schedule in ZERO_BUBBLE_SHARE:
        return waits * ZERO_BUBBLE_SHARE[schedule]
    if schedule == "Interleaved1F1B":
        # with fewer micro-batches than ranks, a rank also waits for the first one to reach its next stage
        return (waits + max(0, stages - micro_batches)) / chunks
    if schedule == "ZBVZeroBubble":  # of six units, F, I and W of two stages
        return max(waits, 4 * waits - 2 * (micro_batches - 1)) / 6
    if schedule == "DualPipeV":  # PyTorch runs a forward pass and the backward pass beside it one after the other
        return 2 * waits / 6
    return waits / (chunks if schedule == "interleaved" else 1)


def micro_batches_kept(
    schedule: str, rank: int, ranks: int, micro_batches: int, cut_share: float = 0.0
) -> tuple[float, float]:
    """Count the micro-batches whose tensors a rank keeps at its peak, of all its stages.

    Args:
        rank: position among the `ranks` of the pipeline, 0-based.
        cut_share: bytes that a micro-batch keeps besides between I and W, by those of its activations. The first stage
            does all of its backward pass in W, and keeps none.

    Returns micro-batches with activations, from F to W or B, and those between I and W; one of two stages counts half.
    """
    kept, chunks = _kept_stages(schedule, rank, ranks, micro_batches), SCHEDULES[schedule].stages_per_rank
    held, between = max(kept, key=lambda counts: counts[0] + cut_share * counts[1])
    return held / chunks, between / chunks


@lru_cache(maxsize=512)
def _kept_stages(schedule: str, rank: int, ranks: int, micro_batches: int) -> set[tuple[int, int]]:
    """Return the most that a rank keeps: micro-batches of a stage from F to W or B, by those from I to W."""
    held, between, most_by_between = 0, 0, dict[int, int]()
    for entry in order(schedule, rank, ranks, micro_batches):
        for work in entry:
            held += {"F": 1, "I": 0}.get(work.kind, -1)
            between += {"I": 1, "W": -1}.get(work.kind, 0) if work.stage else 0
            most_by_between[between] = max(held, most_by_between.get(between, 0))
    return {(most, between) for between, most in most_by_between.items()}


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
