"""A strategy as its files describe it, and the plan of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samecurve.config.documents import Document
from samecurve.config.schema import Recipe
from samecurve.strategy.parallel_dims import BATCH, ParallelDims


@dataclass(frozen=True)
class Strategy:
    """How the run is spread over processes, as written in the strategy's files.

    name: the file's stem, "single" when nothing was chosen.
    family: "single" | "ddp" | "tp" | "fsdp" | "zero" | "pipeline" (DeepSpeed's) | "schedule" (a pipeline by PyTorch);
        "fsdp" may be tensor-parallel, too, see `dims`.
    dims: how the processes are arranged; wrong numbers of processes have been reported before anything reads it.
    path, accelerate: the Accelerate YAML and its content; None and {} for plain python and for a bare DeepSpeed JSON.
    deepspeed_path, deepspeed: the DeepSpeed JSON and its content. launcher: see `launchers.Launch`.
    offload: what leaves the device and where to: "optimizer:cpu", "param:cpu", "optimizer:nvme", "param:nvme".
    nvme_paths: the folders of offloading to NVMe. fsdp_*, pipeline_*: the keys of these names, defaults filled in.

    `accelerate` and `deepspeed` are kept whole for run.json and for DeepSpeed itself; code asks the typed fields.
    """

    name: str
    family: str
    path: Path | None
    accelerate: dict
    deepspeed_path: Path | None
    deepspeed: dict | None
    launcher: str
    world_size: int
    dims: ParallelDims
    zero_stage: int
    offload: tuple[str, ...]
    nvme_paths: tuple[Path, ...] = ()
    fsdp_forward_prefetch: bool = False
    fsdp_reduce_dtype: str = "fp32"
    pipeline_partition: str = "parameters"
    pipeline_checkpoint_interval: int = 1
    pipeline_schedule: str = ""

    @property
    def data_parallel_size(self) -> int:
        return self.dims.size(*BATCH)

    @property
    def pipeline_stages(self) -> int:
        return self.dims.pp

    @property
    def tensor_parallel_size(self) -> int:
        return self.dims.tp

    @property
    def replicate_size(self) -> int:
        """Number of replicas of a sharded model (HSDP); 1 otherwise."""
        return self.dims.dp_replicate if self.family == "fsdp" else 1


@dataclass(frozen=True)
class Plan:
    """recipe_path, overrides: as typed. resume: "auto", "none" or a checkpoint's folder. fresh: an earlier run's
    checkpoints may be moved aside. notes: what the user should hear of how the recipe came about.
    processes_to_start: the ranks that this process is to start instead of being one.
    """

    recipe: Recipe
    strategy: Strategy
    recipe_path: str
    overrides: tuple[str, ...]
    resume: str = "auto"
    fresh: bool = False
    notes: tuple[str, ...] = ()
    processes_to_start: int = 0


@dataclass(frozen=True)
class Files:
    """The strategy's documents; an absent one is empty and has no name."""

    accelerate: Document
    deepspeed: Document
