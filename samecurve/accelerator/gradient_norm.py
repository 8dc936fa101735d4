"""Gradients on their parameters' places in the mesh, and their squared norm in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from samecurve.optim.dtensor import local_gradient, sum_of_squares
from samecurve.strategy.parallel_dims import DIMENSIONS

if TYPE_CHECKING:
    from samecurve.accelerator.mesh import Mesh


def place_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Redistribute each DTensor gradient to its parameter's placements. Collective where they differ.

    PyTorch does not promise equal placements: the gradient of an embedding whose rows are sharded is replicated, and
    that of a norm under sequence parallelism is partial (one summand per rank). Taken for the rank's shard, they make
    the norm wrong by up to a third. Loss and weights stay nearly right, because Adam's update hardly depends on the
    gradient's scale, so the curves would not show the mistake.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def squared_norm(parameters: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """Compute the squared L2 norm of the whole model's gradient. Collective.

    Each element counts once, however many ranks hold it. The caller takes the root on the host, because the root of an
    fp64 tensor can differ from the host's in the last digit.

    Args:
        parameters: this rank's parameters with a gradient, which `place_gradients` has placed.
        mesh: over which the squares are summed.

    Returns:
        (1,) fp64 on the device; the host does not wait for it.
    """
    squares = _by_copies(parameters, mesh)
    if [*squares] == [mesh.dims.world_size]:  # every rank has all gradients
        return squares[mesh.dims.world_size].reshape(1)
    return mesh.total(_share(squares), over=DIMENSIONS)


def squares_share(parameters: Sequence[nn.Parameter], mesh: Mesh) -> Tensor:
    """Compute this rank's share of `squared_norm`, (1,) fp64: the sum over all ranks counts each element once."""
    squares = _by_copies(parameters, mesh)
    return _share(squares) if squares else torch.zeros(1, dtype=torch.float64, device=mesh.device)


def _by_copies(parameters: Sequence[nn.Parameter], mesh: Mesh) -> dict[int, Tensor]:
    """Sum the squares of the gradients of which equally many ranks hold the same elements, by that number."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        by_copies.setdefault(num_copies(parameter, mesh), []).append(local_gradient(parameter))
    return {copies: sum_of_squares(gradients).to(mesh.device) for copies, gradients in by_copies.items()}


def _share(squares: dict[int, Tensor]) -> Tensor:
    return torch.stack([square / copies for copies, square in squares.items()]).sum(0, keepdim=True)


def num_copies(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Number of ranks that hold the same elements of a parameter. Pipeline stages have different parameters."""
    copies = mesh.dims.world_size // mesh.dims.pp
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            copies //= 1 if isinstance(placement, Replicate) else size
    return copies
