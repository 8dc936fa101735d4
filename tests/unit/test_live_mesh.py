"""What a run says of its mesh and of its weights' places, read from PyTorch's objects on a fake process group."""

from __future__ import annotations

import pytest
import torch
from test_gradient_norm import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samecurve.accelerator.mesh import describe_live_mesh, live_placements, live_sizes
from samecurve.strategy.parallel_dims import ParallelDims


def test_the_outermost_dimension_comes_first():
    """By hand: 8 ranks, tp fastest. Of rank 5, the tp group is 4, 5, the shards are 5, 7, and the stages 1, 5."""
    ranks = {"tp": [4, 5], "dp_shard": [5, 7], "pp": [1, 5], "cp": [5]}
    assert list(live_sizes(ranks).items()) == [("pp", 2), ("dp_shard", 2), ("tp", 2)]
    swapped = {"tp": [1, 5], "dp_shard": [5, 7]}
    assert list(live_sizes(swapped).items()) == [("tp", 2), ("dp_shard", 2)]


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(pp=2, dp_shard=2, tp=2),
        ParallelDims(dp_replicate=2, dp_shard=3),
        ParallelDims(dp_shard=2, cp=4, tp=2),
        ParallelDims(cp=2),
        ParallelDims(tp=2),
    ],
)
def test_the_mesh_of_sharded_weights(dims):
    with mesh_of(dims.world_size - 1, dims) as mesh:
        layer = nn.Linear(8, 16, bias=False, device="meta")
        if dims.tp > 1:
            cut = distribute_tensor(layer.weight, mesh.devices["tp"], [Shard(0)], src_data_rank=None)
            layer.weight = nn.Parameter(cut)
        if dims.size("dp_replicate", "dp_shard", "cp") > 1:
            fully_shard(layer, mesh=mesh.sharding)
        groups = {name: mesh.group(name) for name in ("pp", "cp") if dims.size(name) > 1}
        found = describe_live_mesh([layer.weight], {**groups, "dp_replicate": None})
    assert found["dims"] == dims and found["order"] == tuple(name for name, size in dims.sizes.items() if size > 1)


def test_weights_that_nothing_divides_have_no_dimension():
    """A plan of transformers may leave every weight whole."""
    with mesh_of(0, ParallelDims(tp=2)) as mesh:
        whole = distribute_tensor(torch.zeros(4, 4), mesh.devices["tp"], [Replicate()], src_data_rank=None)
        assert describe_live_mesh([whole], {})["dims"] == ParallelDims()


def test_places_are_counted():
    with mesh_of(0, ParallelDims(dp_shard=2, tp=2)) as mesh:
        devices = mesh.devices["dp_shard", "tp"]
        cuts = [(Shard(0), Replicate()), (Shard(0), Replicate()), (Shard(0), Shard(1))]
        weights = [distribute_tensor(torch.zeros(4, 4), devices, cut, src_data_rank=None) for cut in cuts]
        found = live_placements([*weights, torch.zeros(3)])
    assert found == {"dp_shard Shard(0), tp Replicate": 2, "dp_shard Shard(0), tp Shard(1)": 1, "whole": 1}
