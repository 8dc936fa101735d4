"""A rank's range of a flattened parameter or of its optimizer state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from samecurve.specs.optimizers import BLOCK_8BIT


def placed(parameter: nn.Parameter, replica: tuple[int, int]) -> tuple[int, int, tuple[int, int]]:
    """Compute the range of the flattened parameter that this rank holds: (start, stop, (replica index, replicas)).

    `replica` is this rank's (index, count) among all ranks; a parameter that is no DTensor is replicated over all.
    """
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
    """Compute the range, as `placed`, of an optimizer state whose shape differs from the parameter's.

    A state with one entry per row or block is sharded like the parameter's rows; any other state is replicated.

    Args:
        parameter: the parameter of the state.
        key: the optimizer's name of the state.
        shape: the state's full shape.
        replica: this rank's (index, count) among all ranks.
    """
    start, stop, among = placed(parameter, replica)
    if key.startswith("absmax"):  # one value per block; a shard consists of whole blocks
        return -(-start // BLOCK_8BIT), -(-stop // BLOCK_8BIT), among
    if shape[0] != parameter.shape[0]:
        return 0, math.prod(shape), replica
    row = parameter.numel() // parameter.shape[0]
    each = math.prod(shape[1:])
    return start // row * each, stop // row * each, among
