"""Arrangement of a run's processes: the sizes of its parallel dimensions, and each rank's place in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
BATCH = ("dp_replicate", "dp_shard")  # ranks that differ in one of these read different rows
# Ranks that differ in one of these train different tokens: token counts and losses are summed over them, and gradients
# averaged.
LOSS = (*BATCH, "cp")
FSDP = ("dp_shard", "cp")  # a replica of the model is sharded over them


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the parallel dimensions, from the outermost to the innermost.

    Ranks are numbered like the digits of a number, with `tp` as the last digit: a tensor-parallel group, which
    communicates most, consists of neighbours on one host, and pipeline stages, which communicate least, are farthest
    apart. Accelerate, torchtitan and transformers number them in the same way.

    Attributes:
        pp: pipeline stages.
        dp_replicate: replicas of the model.
        dp_shard: shards of each replica; they read different rows.
        cp: parts into which a row's sequence is cut.
        tp: parts into which each layer's weights are cut.
        ep: ranks that share the experts of a layer, each expert whole on one of them. No dimension of its own: the
            innermost part of dp_shard x cp.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def efsdp(self) -> int:
        """Ranks over which an expert is sharded: those of a replica that hold the same experts."""
        return self.size(*FSDP) // self.ep

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The sizes by name, outermost first, as experts are arranged."""
        names = ("pp", "dp_replicate", "efsdp", "ep", "tp")
        return {name: getattr(self, name) for name in names}

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every dimension by name, outermost first."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def dp(self) -> int:
        """Ranks that read different rows."""
        return self.size(*BATCH)

    @property
    def world_size(self) -> int:
        return self.size(*DIMENSIONS)

    def size(self, *names: str) -> int:
        """Return the number of ranks that differ in the named dimensions only."""
        return math.prod(getattr(self, name) for name in names)

    def place(self, rank: int) -> dict[str, int]:
        """Return the rank's index in every dimension."""
        place = {}
        for name, size in reversed(self.sizes.items()):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in DIMENSIONS}

    def index(self, rank: int, *names: str) -> int:
        """Return the rank's index among the ranks that differ from it in the named dimensions only."""
        place, index = self.place(rank), 0
        for name in DIMENSIONS:
            if name in names:
                index = index * getattr(self, name) + place[name]
        return index

    def groups(self, *names: str) -> list[list[int]]:
        """List all groups of ranks that differ in the named dimensions only."""
        ranks_by_place: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            others = self.index(rank, *(name for name in DIMENSIONS if name not in names))
            ranks_by_place.setdefault(others, []).append(rank)
        return list(ranks_by_place.values())
