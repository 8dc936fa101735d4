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
from test_flat_region import values_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from samecurve.accelerator.mesh import Mesh
from samecurve.accelerator.shard_regions import placed
from samecurve.interfaces.region import Region
from samecurve.strategy.parallel_dims import ParallelDims

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
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def mesh_seen_by(rank: int, *sizes: int) -> Iterator[DeviceMesh]:
    with fake_ranks(rank, torch.Size(sizes).numel()):
        yield init_device_mesh("cpu", sizes)


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


MANY = ParallelDims(dp_shard=32, cp=4, tp=8, ep=16)  # 1,024 ranks: 128 shards of 8 parts, or 16 groups of experts by 8
# by name: the mesh, the shape and the placements
OF_MANY = {
    "column-parallel under FSDP2": ("weights", (2048, 3), (_StridedShard(0, split_factor=8), Shard(0))),
    "row-parallel under FSDP2": ("weights", (256, 24), (Shard(0), Shard(1))),
    "packed gate and up": ("weights", (64, 6), (Replicate(), _StridedShard(0, split_factor=2))),
    "packed experts under FSDP2": ("weights", (128, 32, 3), (Shard(0), _StridedShard(1, split_factor=2))),
    "experts": ("experts", (256, 6, 5), (_StridedShard(0, split_factor=16), Shard(0))),
    "experts, each cut": ("experts", (16, 24, 5), (Shard(1), Shard(0))),
}


OF_MANY_DAILY = ["packed gate and up", "packed experts under FSDP2", "experts"]


def mesh_of_many(rank: int, kind: str) -> DeviceMesh:
    """The engines' mesh of a kind of weights as `rank` sees it, without process groups, which take 0.2 s to make."""
    ranks, options = torch.arange(MANY.world_size), {"_init_backend": False, "_rank": rank}
    if kind == "weights":
        return DeviceMesh("cpu", ranks.view(-1, MANY.tp), mesh_dim_names=("fsdp", "tp"), **options)
    own = ranks.view(MANY.efsdp, MANY.ep, MANY.tp)[..., MANY.place(rank)["tp"]]
    return DeviceMesh("cpu", own, mesh_dim_names=("efsdp", "ep"), **options)


def region_of(mesh: DeviceMesh, rank: int, shape, placements) -> tuple[Region, tuple[int, int]]:
    strides = torch.empty(shape, device="meta").stride()
    nothing = torch.empty(0)  # `placed` reads no values
    weight = DTensor.from_local(nothing, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
    return placed(cast(nn.Parameter, weight), (rank, MANY.world_size))


@pytest.mark.parametrize(
    "layout",
    [*OF_MANY_DAILY, *(pytest.param(each, marks=pytest.mark.full) for each in OF_MANY if each not in OF_MANY_DAILY)],
)
def test_1024_ranks_hold_every_value_equally_often(layout, monkeypatch):
    kind, shape, placements = OF_MANY[layout]
    monkeypatch.setattr(DeviceMesh, "get_local_rank", lambda mesh, dimension: mesh.get_coordinate()[dimension])
    copies = torch.zeros(torch.Size(shape).numel(), dtype=torch.int32)
    found = [region_of(mesh_of_many(rank, kind), rank, shape, placements) for rank in range(MANY.world_size)]
    for region, _ in found:
        copies.as_strided((region.count, region.length), (region.stride, 1), region.start).add_(1)
    replicas = found[0][1][1]
    assert replicas == {"packed gate and up": 128, "experts": 8, "experts, each cut": 8}.get(layout, 1)
    assert (copies == replicas).all()
    # one rank is the n-th holder of a region
    assert {count for _, (_, count) in found} == {replicas} and len(set(found)) == MANY.world_size


@pytest.mark.parametrize("rank", [0, 5, 511, 1023])
def test_one_of_1024_ranks(rank):
    """What torch gives it in the mesh of a run, and that this mesh is the one of the test above."""
    with fake_ranks(rank, MANY.world_size):
        mesh = Mesh(MANY, rank, torch.device("cpu"))
        fsdp = mesh.sharding
        meshes = {"weights": mesh.devices["dp_shard", "cp", "tp"], "experts": mesh.experts["efsdp", "ep"]}
        assert fsdp.size() == MANY.world_size // MANY.tp
        assert meshes["weights"].mesh.equal(torch.arange(MANY.world_size).view(32, 4, 8))
        for kind, shape, placements in OF_MANY.values():
            cheap = mesh_of_many(rank, kind)
            if kind == "experts":
                assert meshes[kind].mesh.equal(cheap.mesh) and meshes[kind].get_coordinate() == cheap.get_coordinate()
            whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
            held = distribute_tensor(whole, cheap, placements, src_data_rank=None).to_local().flatten()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DeviceMesh, "get_local_rank", lambda mesh, dimension: mesh.get_coordinate()[dimension])
                region, _ = region_of(cheap, rank, shape, placements)
            assert values_of(region) == held.tolist()


def test_a_layout_without_equal_runs_is_refused():
    with pytest.raises(AssertionError, match="unknown placements"):
        held_by(0, (2, 2), (4, 8, 6), (Shard(1), Shard(2)))
