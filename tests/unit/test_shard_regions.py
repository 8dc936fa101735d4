"""Which values of a weight each rank of a device mesh holds, against the values that torch gives it.

A fake process group stands for the other ranks, so that meshes of any size fit into one process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from samecurve.engines.shard_regions import placed
from samecurve.interfaces.region import Region

LAYOUTS = {
    "FSDP2": ((8, 6), (Shard(0), Replicate())),
    "column-parallel under FSDP2": ((8, 6), (_StridedShard(0, split_factor=2), Shard(0))),
    "row-parallel under FSDP2": ((8, 6), (Shard(0), Shard(1))),
    "row-parallel": ((8, 6), (Replicate(), Shard(1))),
    "packed experts": ((3, 8, 6), (Replicate(), _StridedShard(1, split_factor=2))),
    "packed experts under FSDP2": ((4, 8, 6), (Shard(0), _StridedShard(1, split_factor=2))),
    "packed gate and up": ((8, 6), (Replicate(), _StridedShard(0, split_factor=2))),
    "experts, row-parallel under FSDP2": ((4, 6, 8), (Shard(0), Shard(2))),
    "experts over two dimensions": ((8, 6, 5), (_StridedShard(0, split_factor=2), Shard(0))),
    "fewer experts than ranks": ((2, 6, 5), (Shard(1), Shard(0))),
    "uneven rows": ((7, 6), (_StridedShard(0, split_factor=2), Shard(0))),
    "fewer rows than ranks": ((1, 6), (Shard(0), Replicate())),
    "norm": ((8,), (Shard(0), Replicate())),
    "replicated": ((8, 6), (Replicate(), Replicate())),
}


@contextmanager
def mesh_seen_by(rank: int, *sizes: int) -> Iterator[DeviceMesh]:
    world_size = torch.Size(sizes).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", sizes)
    finally:
        dist.destroy_process_group()


def values_of(region: Region) -> list[int]:
    return [region.start + run * region.stride + i for run in range(region.count) for i in range(region.length)]


def held_by(rank: int, sizes: tuple[int, ...], shape, placements) -> tuple[list[int], tuple[int, int]]:
    with mesh_seen_by(rank, *sizes) as mesh:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
        # not made a Parameter: an operation would be cached, with the mesh of the rank before
        weight = cast(nn.Parameter, distribute_tensor(whole, mesh, placements, src_data_rank=None))
        region, replica = placed(weight, (rank, mesh.size()))
        assert values_of(region) == cast(DTensor, weight).to_local().flatten().int().tolist()
    return values_of(region), replica


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_region_is_what_the_rank_holds(layout):
    shape, placements = LAYOUTS[layout]
    found = [held_by(rank, (2, 2), shape, placements) for rank in range(4)]
    copies = Counter(value for values, _ in found for value in values)
    assert sorted(copies) == list(range(torch.Size(shape).numel()))
    replicas = found[0][1][1]
    assert set(copies.values()) == {replicas}
    assert sorted(index for _, (index, _) in found) == sorted([*range(replicas)] * (4 // replicas))


@pytest.mark.parametrize("rank", [0, 5, 511, 1023])
def test_one_of_1024_ranks(rank):
    held_by(rank, (128, 8), (256, 64), (_StridedShard(0, split_factor=8), Shard(0)))
    held_by(rank, (128, 8), (256, 64), (Shard(0), Shard(1)))


def test_a_layout_without_equal_runs_is_refused():
    with pytest.raises(AssertionError, match="unknown placements"):
        held_by(0, (2, 2), (4, 8, 6), (Shard(1), Shard(2)))
