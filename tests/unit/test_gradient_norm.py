"""The gradient norm over a mesh: each element counts once, whoever holds it and wherever PyTorch left its gradient.

A fake process group stands for the other ranks; it sums nothing, so each rank's own part of the squares is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from samecurve.accelerator.gradient_norm import place_gradients, squared_norm
from samecurve.accelerator.mesh import Mesh
from samecurve.strategy.parallel_dims import ParallelDims

WHOLE = torch.arange(1.0, 33.0).reshape(8, 4)
DIMS = ParallelDims(pp=2, dp_shard=2, tp=2)


@contextmanager
def mesh_of(rank: int, dims: ParallelDims = DIMS) -> Iterator[Mesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
    try:
        yield Mesh(dims, rank, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def parameter(mesh: Mesh, placements: list[Placement], gradient: list[Placement]) -> nn.Parameter:
    """A weight on (dp_shard, tp) whose gradient is WHOLE, left in other places."""
    devices = mesh.devices["dp_shard", "tp"]
    made = nn.Parameter(distribute_tensor(torch.zeros(8, 4), devices, placements, src_data_rank=None))
    made.grad = distribute_tensor(WHOLE, devices, gradient, src_data_rank=None)
    return made


def test_a_gradient_that_came_whole_is_cut_as_its_weight():
    """The vocabulary-parallel embedding: taken as this rank's part, its squares would count twice."""
    with mesh_of(0) as mesh:
        weight = parameter(mesh, [Replicate(), Shard(0)], [Replicate(), Replicate()])
        place_gradients([weight])
        assert weight.grad.placements == weight.placements
        assert torch.equal(weight.grad.to_local(), WHOLE[:4])


@pytest.mark.parametrize(
    ("placements", "part", "copies"),
    [
        ([Replicate(), Replicate()], WHOLE, 4),  # 8 ranks in two stages
        ([Shard(0), Replicate()], WHOLE[:4], 2),
        ([Replicate(), Shard(1)], WHOLE[:, :2], 2),
        ([Shard(0), Shard(1)], WHOLE[:4, :2], 1),
    ],
)
def test_an_element_counts_once_however_many_ranks_hold_it(placements, part, copies):
    with mesh_of(0) as mesh:
        weight = parameter(mesh, placements, placements)
        norm = math.sqrt(squared_norm([weight], mesh))
    assert norm == pytest.approx(math.sqrt(part.double().square().sum() / copies))


def test_a_plain_weight_is_held_by_every_rank_of_its_stage():
    with mesh_of(0) as mesh:
        weight = nn.Parameter(torch.zeros(8, 4))
        weight.grad = WHOLE.clone()
        assert math.sqrt(squared_norm([weight], mesh)) == pytest.approx(WHOLE.double().norm().item() / 2)


def test_replicas_need_no_communication():
    with mesh_of(0, ParallelDims(dp_replicate=2)) as mesh:
        weight = nn.Parameter(torch.zeros(8, 4))
        weight.grad = WHOLE.clone()
        assert math.sqrt(squared_norm([weight], mesh)) == WHOLE.double().norm().item()
