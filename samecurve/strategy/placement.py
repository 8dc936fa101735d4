"""Processes that suit a strategy's file, and the strategy to try next. Loads no torch, reports no mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samecurve.specs.environment import has_accelerator
from samecurve.strategy.launchers import Launch
from samecurve.strategy.resolve import describe_strategy, read_files

REFERENCE = "single"  # what every other strategy has to match


@dataclass(frozen=True)
class Placement:
    """A way to start a strategy. path: of --strategy, None for plain python. world_size: number of processes."""

    path: Path | None
    world_size: int


def place_strategy(path: Path, num_processes: int) -> Placement:
    """Choose the number of processes for a strategy: `num_processes`, raised to the next number that it supports.

    Some strategies run on one number only, whatever is asked for: 1 without distribution, the size of the one group
    for tensor parallelism without FSDP. Invalid values in the files count as absent: the run itself reports them.
    """
    files = read_files(str(path))
    if files.accelerate.get("distributed_type") == "NO":
        return Placement(None, 1)
    strategy = describe_strategy(files, Launch("torchrun", num_processes))
    dims, is_fsdp = strategy.dims, files.accelerate.get("distributed_type") == "FSDP"
    # a replica of one shard is no sharding, and Accelerate refuses it; one group has no use for a second copy
    least = 2 if strategy.replicate_size > 1 or strategy.secondary_partition > 1 else 1
    if is_fsdp and dims.size("pp", "tp") > 1 and dims.size("cp", "ep") == 1:
        least = 2  # the ranks of a sequence or of a layer's experts shard, too; without those nothing would
    if dims.tp > 1 and not is_fsdp:
        return Placement(path, dims.size("pp", "tp"))  # a cut model has no replicas
    unit = strategy.replicate_size * strategy.secondary_partition * dims.size("pp", "cp", "tp", "ep")
    return Placement(path, max(-(-num_processes // unit), least) * unit)


def another_strategy(strategy: str) -> str:
    """Return the strategy to suggest after a run of this one: of another family, for models of any size."""
    return "fsdp" if strategy.startswith("zero3") else "zero3"


def num_processes_again(world_size: int) -> int | None:
    """Return the number of processes to suggest for another strategy after a run; None for its file's own number.

    It is that of the run. After a run of one process on a CPU it is None, because more processes can be rehearsed
    there, while one GPU takes only one process.
    """
    return world_size if world_size > 1 or has_accelerator() else None
