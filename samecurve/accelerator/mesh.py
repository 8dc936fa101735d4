"""A run's processes as a device mesh, with sums and gathers over its dimensions; and the mesh an engine really has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from samecurve.data.micro_batch import Counts, MicroBatch
from samecurve.distributed.control_group import ControlGroup
from samecurve.optim.dtensor import all_reduce_sums
from samecurve.strategy.parallel_dims import BATCH, DIMENSIONS, FSDP, LOSS, ParallelDims

_BUCKET_BYTES = 25_000_000  # as DDP's


class Mesh:
    """The processes in the arrangement of `dims`. Its methods are collective.

    Attributes:
        shard: (index, count) of this rank among those that read different rows.
        loss_ranks: number of ranks that train different tokens; gradients are averaged over them.
    """

    def __init__(self, dims: ParallelDims, rank: int, device: torch.device):
        self.dims, self.rank, self.device = dims, rank, device
        self.shard = dims.index(rank, *BATCH), dims.size(*BATCH)
        self.loss_ranks = dims.size(*LOSS)
        self._same_rows = dims.world_size // self.shard[1]
        self._known_ranks: dict[tuple[str, ...], tuple[int, dist.ProcessGroup | None]] = {}

    @cached_property
    def devices(self) -> DeviceMesh:
        """PyTorch's mesh of all dimensions, those of size 1 included. Collective at its first use."""
        shape = tuple(self.dims.sizes.values())
        return init_device_mesh(self.device.type, shape, mesh_dim_names=DIMENSIONS)

    @cached_property
    def experts(self) -> DeviceMesh:
        """PyTorch's mesh of the same ranks, with dp_shard x cp divided into efsdp x ep. Collective at its first use."""
        names, shape = zip(*self.dims.expert_sizes.items(), strict=True)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    @cached_property
    def sharding(self) -> DeviceMesh:
        """The mesh over which FSDP2 shards a replica; with replicas its first dimension is that of the replicas."""
        shards = self.devices[FSDP]._flatten("fsdp")  # FSDP2 shards over a single dimension
        return self.devices["dp_replicate", "fsdp"] if self.dims.dp_replicate > 1 else shards

    def count(self, micro_batches: Sequence[MicroBatch], count: Callable[..., int]) -> Counts:
        """Count a step over the ranks that read different rows, without a wait for the device. `count`: Task.count.

        The sum has been there since the step before if the loader started it, see BatchFacts.
        """
        facts = micro_batches[0].facts
        started = facts and facts.step_sums
        (totals,) = (started or self._hosts.start_sum(Counts.of_step(micro_batches, count))).wait()
        return Counts(*(totals // self._same_rows).tolist())  # ranks with the same rows counted the same tokens

    def total(self, values: Tensor, over: tuple[str, ...] = LOSS) -> Tensor:
        """Sum each value of a 1-D tensor, by default over the ranks that train different tokens.

        Returns:
            fp64 on the device; nothing waits for it.
        """
        total = values.to(self.device, torch.float64, copy=True, non_blocking=True)  # a copy: all_reduce is in place
        size, group = self._ranks(over)
        if values.numel() and size > 1:
            dist.all_reduce(total, group=group)
        return total

    def sum(self, values: Tensor, over: tuple[str, ...] = LOSS) -> tuple[float, ...]:
        """Sum as `total`, and wait for the result."""
        return tuple(self.total(values, over).tolist())

    def add(self, tensors: Sequence[Tensor], over: tuple[str, ...]) -> None:
        """Sum tensors of one dtype in place over the ranks that differ in these dimensions, some megabytes at once."""
        if self.dims.size(*over) == 1:
            return
        bucket: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            bucket.append(tensor)
            if index + 1 == len(tensors) or sum(waiting.nbytes for waiting in bucket) > _BUCKET_BYTES:
                for summand, total in zip(bucket, all_reduce_sums(bucket, self.group(*over)), strict=True):
                    summand.copy_(total)
                bucket = []

    @cached_property
    def _hosts(self) -> ControlGroup:
        return ControlGroup()

    def gather(self, rows: Tensor, over: tuple[str, ...] = BATCH) -> Tensor:
        """Concatenate the rows of all ranks, equally many on each; by default of the ranks that read different rows."""
        size, group = self._ranks(over)
        if size == 1:
            return rows
        parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    def group(self, *dimensions: str) -> dist.ProcessGroup:
        """The process group of the ranks that differ in these dimensions only."""
        size, part = self._ranks(dimensions)
        assert size > 1, f"{dimensions} have one rank"
        group = part or dist.group.WORLD
        assert group is not None, "a run of several processes has a group"
        return group

    def _ranks(self, dimensions: tuple[str, ...]) -> tuple[int, dist.ProcessGroup | None]:
        """Number and process group of the ranks that differ in these dimensions; None: one rank or all of them."""
        if dimensions not in self._known_ranks:
            size = self.dims.size(*dimensions)
            part = 1 < size < self.dims.world_size
            self._known_ranks[dimensions] = size, self.devices[dimensions]._flatten().get_group() if part else None
        return self._known_ranks[dimensions]


def copy_to_host(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy a 1-D tensor; the returned function waits for the copy, not for kernels that were queued later."""
    if values.device.type != "cuda":
        return values.tolist
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    pinned.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return pinned.tolist()

    return read


def describe_live_mesh(weights: Sequence[Tensor], groups: Mapping[str, dist.ProcessGroup | None]) -> dict[str, Any]:
    """Collect the fields of EngineDescription that the weights show.

    Args:
        weights: this rank's weights.
        groups: by dimension, the group of this rank in those that no weight shows: weights are not cut over pipeline
            stages, parts of a sequence and DDP's replicas. None if there is no such group.
    """
    ranks = {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}
    shown: dict[str, list[int]] = {}  # this rank's group of replicas, and those over which a weight is divided
    for weight in (weight for weight in weights if isinstance(weight, DTensor)):
        mesh = weight.device_mesh
        for name, placement in zip(mesh.mesh_dim_names or (), weight.placements, strict=True):
            is_used = name == "dp_replicate" or not placement.is_replicate()
            if is_used and name not in shown and mesh[name].size() > 1:
                shown[name] = dist.get_process_group_ranks(mesh.get_group(name))
    # FSDP2 shards over dp_shard x cp as a single dimension
    shown["dp_shard"] = shown.pop("fsdp", [])[:: len(ranks.get("cp", [0]))]
    sized = live_sizes({**shown, **ranks})
    dims = ParallelDims(**sized, ep=max(1, len(shown.get("ep", []))))
    return {"dims": dims, "order": tuple(sized), "placements": live_placements(weights)}


def live_sizes(ranks: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the sizes of the dimensions with more than one rank, from the outermost to the innermost.

    Args:
        ranks: by dimension, the ranks that differ in it only. The farther apart neighbours are, the farther out it is.
    """
    distance = {name: group[1] - group[0] for name, group in ranks.items() if name in DIMENSIONS and len(group) > 1}
    return {name: len(ranks[name]) for name in sorted(distance, key=lambda name: -distance[name])}


def live_placements(weights: Iterable[Tensor]) -> dict[str, int]:
    """Count the weights by how they are placed on their mesh, e.g. {"fsdp Shard(0), tp Replicate": 9, "whole": 2}.

    A weight that is no DTensor is whole, or DeepSpeed has divided it.
    """
    counts: Counter[str] = Counter()
    for weight in weights:
        if not isinstance(weight, DTensor):
            counts["whole"] += 1
            continue
        names = weight.device_mesh.mesh_dim_names or ("",) * weight.device_mesh.ndim
        placements: list[str] = []
        for name, placement in zip(names, weight.placements, strict=True):
            # as in PyTorch's documentation: Shard(0) where its repr is Shard(dim=0)
            axis = f"({placement.dim})" if hasattr(placement, "dim") else ""  # pyright: ignore
            placements.append(f"{name} {type(placement).__name__.lstrip('_')}{axis}")
        counts[", ".join(placements)] += 1
    return dict(counts.most_common())
