"""The arrangement of processes and weights that an engine really has, read from its process groups and its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from samecurve.strategy.parallel_dims import DIMENSIONS, ParallelDims


def describe(weights: Sequence[Tensor], groups: Mapping[str, dist.ProcessGroup | None]) -> dict[str, Any]:
    """Collect the fields of EngineDescription that the weights show.

    Args:
        weights: this rank's weights.
        groups: by dimension, the group of this rank in those that no weight shows: weights are not cut over pipeline
            stages, parts of a sequence and DDP's replicas. None if there is no such group.
    """
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}
    shown = _groups_of(weights)
    # FSDP2 shards over dp_shard x cp as a single dimension
    shown["dp_shard"] = shown.pop("fsdp", [])[:: len(ranks.get("cp", [0]))]
    sized = sizes({**shown, **ranks})
    dims = ParallelDims(**sized, ep=max(1, len(shown.get("ep", []))))
    return {"dims": dims, "order": tuple(sized), "placements": placements(weights)}


def sizes(ranks: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the sizes of the dimensions with more than one rank, from the outermost to the innermost.

    Args:
        ranks: by dimension, the ranks that differ in it only. The farther apart neighbours are, the farther out it is.
    """
    distance = {name: group[1] - group[0] for name, group in ranks.items() if name in DIMENSIONS and len(group) > 1}
    return {name: len(ranks[name]) for name in sorted(distance, key=lambda name: -distance[name])}


def placements(weights: Iterable[Tensor]) -> dict[str, int]:
    """Count the weights by how they are placed on their mesh, e.g. {"fsdp Shard(0), tp Replicate": 9, "whole": 2}.

    A weight that is no DTensor is whole, or DeepSpeed has divided it.
    """
    return dict(Counter(map(_placement, weights)).most_common())


def _groups_of(weights: Iterable[Tensor]) -> dict[str, list[int]]:
    """Return the ranks of this rank's group by mesh dimension: replicas, and those over which a weight is divided."""
    groups: dict[str, list[int]] = {}
    for weight in weights:
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            for name, placement in zip(mesh.mesh_dim_names or (), weight.placements, strict=True):
                is_used = name == "dp_replicate" or not placement.is_replicate()
                if is_used and name not in groups and mesh[name].size() > 1:
                    groups[name] = dist.get_process_group_ranks(mesh.get_group(name))
    return groups


def _placement(weight: Tensor) -> str:
    if not isinstance(weight, DTensor):
        return "whole"
    names = weight.device_mesh.mesh_dim_names or ("",) * weight.device_mesh.ndim
    return ", ".join(f"{name} {_named(placement)}" for name, placement in zip(names, weight.placements, strict=True))


def _named(placement: Placement) -> str:
    """Name a placement as in PyTorch's documentation: Shard(0) where its repr is Shard(dim=0)."""
    axis = f"({placement.dim})" if hasattr(placement, "dim") else ""  # pyright: ignore[reportAttributeAccessIssue]
    return type(placement).__name__.lstrip("_") + axis
