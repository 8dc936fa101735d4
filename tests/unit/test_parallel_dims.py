"""The arrangement of ranks, against lists by hand and against the axes of an array."""

from __future__ import annotations

import itertools

import pytest
import torch

from samecurve.strategy.parallel_dims import BATCH, DIMENSIONS, FSDP, LOSS, ParallelDims

SIXTEEN = ParallelDims(pp=4, dp_shard=2, tp=2)  # the example of the Megatron-LM papers


def test_sixteen_ranks_by_hand():
    assert SIXTEEN.world_size == 16
    assert SIXTEEN.groups("tp") == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert SIXTEEN.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert SIXTEEN.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert SIXTEEN.place(13) == {"pp": 3, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert [SIXTEEN.index(rank, *BATCH) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_experts_are_spread_over_neighbours_that_read_different_rows():
    """By hand: on 16 ranks as 2 x 4 x 2, two ranks share the experts, and four pairs hold the same ones."""
    dims = ParallelDims(dp_replicate=2, dp_shard=4, cp=2, ep=2)
    assert (dims.world_size, dims.efsdp) == (16, 4)
    assert dims.expert_sizes == {"pp": 1, "dp_replicate": 2, "efsdp": 4, "ep": 2, "tp": 1}
    assert dims.sizes == ParallelDims(dp_replicate=2, dp_shard=4, cp=2).sizes  # experts change no other group
    assert dims.index(3, *LOSS) == 3


@pytest.mark.parametrize("sizes", [(1, 2, 2, 1, 1), (2, 1, 2, 2, 2), (1, 2, 3, 2, 1), (1, 1, 1, 1, 1)])
@pytest.mark.parametrize("names", [("tp",), ("pp",), BATCH, LOSS, FSDP, DIMENSIONS])
def test_groups_are_those_of_a_device_mesh(sizes, names):
    dims = ParallelDims(*sizes)
    mesh = torch.arange(dims.world_size).reshape(sizes)
    kept = [position for position, name in enumerate(DIMENSIONS) if name in names]
    others = [position for position in range(len(DIMENSIONS)) if position not in kept]
    expected = mesh.permute(*others, *kept).reshape(-1, dims.size(*names)).tolist()
    assert sorted(dims.groups(*names)) == sorted(expected)
    for rank, group in itertools.product(range(dims.world_size), expected):
        if rank in group:
            assert dims.index(rank, *names) == group.index(rank)
