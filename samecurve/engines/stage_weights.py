"""Weights of a pipeline's stages, brought to rank 0 one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def on_rank_0(
    shapes: Mapping[str, torch.Size],
    device: torch.device,
    owner: Callable[[str], int],
    whole: Callable[[str], Tensor | None],
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield what Engine.parameters does. Collective.

    Args:
        shapes: of the weights to yield.
        device: the device that this rank computes on.
        owner: the rank that sends a weight.
        whole: the full fp32 tensor, collectively gathered over the ranks that have its stage; None on all others.
    """
    rank = dist.get_rank()
    for name, shape in shapes.items():
        sender, full = owner(name), whole(name)
        if full is not None and rank == sender != 0:
            dist.send(full, dst=0)
        elif full is None and rank == 0:
            full = torch.empty(shape, device=device)
            dist.recv(full, src=sender)
        yield name, full.cpu() if full is not None and rank == 0 else None
