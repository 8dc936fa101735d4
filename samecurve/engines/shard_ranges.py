"""Which range of a flattened parameter, or of what an optimizer keeps of it, a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from samecurve.specs.optimizers import BLOCK_8BIT


def placed(parameter: nn.Parameter, replica: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
    """(start, stop, (replica index, number of replicas)) of the range that this rank holds."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel(), replica
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    assert all(isinstance(p, Replicate) or p == Shard(0) for p in placements), f"unknown placements {placements}"
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    row = parameter.numel() // max(parameter.shape[0], 1)
    index, count = 0, 1
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            index, count = index * mesh.size(dimension) + mesh.get_local_rank(dimension), count * mesh.size(dimension)
    return offset[0] * row, (offset[0] + shape[0]) * row, (index, count)


def factor_placed(
    parameter: nn.Parameter, key: str, shape: Sequence[int], replica: tuple[int, int]
) -> tuple[int, int, tuple[int, int]]:
    """As placed, for a factor of this full shape: what has the parameter's rows or blocks is held with them, else
    whole.

    key: the optimizer's name of it. replica: this rank among all.
    """
    start, stop, among = placed(parameter, replica)
    if key.startswith("absmax"):  # one for each block of values, of which a shard has whole ones
        return -(-start // BLOCK_8BIT), -(-stop // BLOCK_8BIT), among
    if shape[0] != parameter.shape[0]:
        return 0, math.prod(shape), replica
    row = parameter.numel() // parameter.shape[0]
    each = math.prod(shape[1:])
    return start // row * each, stop // row * each, among
