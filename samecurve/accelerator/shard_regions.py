"""A rank's region of a flattened parameter or of its optimizer state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from samecurve.interfaces.region import Region
from samecurve.specs.optimizers import BLOCK_8BIT


def placed(parameter: nn.Parameter, replica: tuple[int, int]) -> tuple[Region, tuple[int, int]]:
    """Compute the region of the flattened parameter that this rank holds: (region, (replica index, replicas)).

    `replica` is this rank's (index, count) among all ranks; a parameter that is no DTensor is replicated over all.
    """
    if not isinstance(parameter, DTensor):
        return Region(0, parameter.numel()), replica
    mesh, index, count = parameter.device_mesh, 0, 1
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Replicate):
            index, count = index * mesh.size(dimension) + mesh.get_local_rank(dimension), count * mesh.size(dimension)
    others = replica[1] // mesh.size()
    if others > 1:  # ranks outside of its mesh, the innermost dimension, hold the same: a norm under tensor parallelism
        index, count = index * others + replica[0] % others, count * others
    return _region(parameter), (index, count)


def _region(parameter: DTensor) -> Region:
    """Compute the region of a DTensor that is cut in dimension 0, in one later dimension, or in both."""
    shape = parameter.shape
    cut = [d for d in range(parameter.ndim) if any(_cuts(placement, d) for placement in parameter.placements)]
    rows = _runs(parameter, 0) if 0 in cut else Region(0, shape[0] if shape else 1)
    inner = math.prod(shape[1:])
    if cut in ([], [0]):
        return Region(rows.start * inner, rows.length * inner, rows.count, rows.stride * inner)
    *_, dimension = cut
    assert set(cut) <= {0, dimension} and rows.count == 1, f"unknown placements {parameter.placements}"
    runs, inner = _runs(parameter, dimension), math.prod(shape[dimension + 1 :])
    if runs.count > 1:  # of a packed weight, each rank holds a part of every half
        assert runs.count * runs.stride == shape[dimension], f"unknown placements {parameter.placements}"
    outer = rows.length * math.prod(shape[1:dimension])
    start = rows.start * math.prod(shape[1:]) + runs.start * inner
    count, stride = outer * runs.count, (runs.stride or shape[dimension]) * inner
    return Region(start, runs.length * inner, count, stride) if count > 1 else Region(start, runs.length * inner)


def _cuts(placement: Placement, dimension: int) -> bool:
    return not isinstance(placement, Replicate) and getattr(placement, "dim", None) == dimension


def _runs(parameter: DTensor, dimension: int) -> Region:
    """Compute which indexes of one dimension this rank holds.

    The indexes are distributed as the weight is. For a packed weight (_StridedShard), of which a rank holds several
    parts, compute_local_shape_and_global_offset of torch 2.13 is wrong without an error.
    """
    placements: list[Placement] = []  # of a tensor that has only the dimension that they cut
    for placement in parameter.placements:
        if not _cuts(placement, dimension):
            placements.append(Replicate())
        elif type(placement) is Shard:
            placements.append(Shard(0))
        else:  # _StridedShard, which is private
            placements.append(type(placement)(0, split_factor=placement.split_factor))  # pyright: ignore
    indexes = torch.arange(parameter.shape[dimension], device=parameter.device_mesh.device_type)
    held = distribute_tensor(indexes, parameter.device_mesh, placements, src_data_rank=None).to_local()
    if not held.numel():
        return Region(0, 0)
    breaks = (held.diff() != 1).nonzero().flatten() + 1
    starts = held[torch.cat([breaks.new_zeros(1), breaks])]
    length, strides = held.numel() // len(starts), starts.diff().unique()
    whole = length * len(starts) == held.numel() and len(strides) <= 1
    assert whole and (breaks == torch.arange(1, len(starts)) * length).all(), f"unknown placements {placements}"
    return Region(int(starts[0]), length, len(starts), int(strides[0]) if len(starts) > 1 else 0)


def factor_placed(
    parameter: nn.Parameter, key: str, shape: Sequence[int], replica: tuple[int, int]
) -> tuple[Region, tuple[int, int]]:
    """Compute the region, as `placed`, of an optimizer state whose shape differs from the parameter's.

    A state with one entry per row or block is sharded like the parameter's rows; any other state is replicated.

    Args:
        parameter: the parameter of the state.
        key: the optimizer's name of the state.
        shape: the state's full shape.
        replica: this rank's (index, count) among all ranks.
    """
    region, among = placed(parameter, replica)
    assert region.count == 1, f"{key} of a weight that is cut in columns"  # the plan refuses such optimizers
    start, stop = region.start, region.start + region.length
    if key.startswith("absmax"):  # one value per block; a shard consists of whole blocks
        first = -(-start // BLOCK_8BIT)
        return Region(first, -(-stop // BLOCK_8BIT) - first), among
    if shape[0] != parameter.shape[0]:
        return Region(0, math.prod(shape)), replica
    row = parameter.numel() // parameter.shape[0]
    row_numel = math.prod(shape[1:])
    return Region(start // row * row_numel, (stop - start) // row * row_numel), among
