"""A strategy as its files describe it, and the plan of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samecurve.config.documents import Document
from samecurve.config.schema import Recipe
from samecurve.strategy.parallel_dims import BATCH, ParallelDims


@dataclass(frozen=True)
class Strategy:
    """Distribution of the run over processes, as written in the strategy's files.

    `accelerate` and `deepspeed` are kept whole for run.json and for DeepSpeed itself. Code reads the typed fields.

    Attributes:
        name: the file's stem, "single" when nothing was chosen.
        family: "single" | "ddp" | "tp" | "fsdp" | "zero" | "pipeline" (DeepSpeed's) | "schedule" (a pipeline by
            PyTorch); "fsdp" may be tensor-, context- or expert-parallel, too, see `dims`.
        path, accelerate: the Accelerate YAML and its content; None and {} for plain python and a bare DeepSpeed JSON.
        deepspeed_path, deepspeed: the DeepSpeed JSON and its content; None without DeepSpeed.
        launcher: see `launchers.Launch`.
        world_size: number of processes.
        dims: how the processes are arranged; wrong numbers of processes have been reported before anything reads it.
        zero_stage: 0 without ZeRO.
        offload: what leaves the device and where to: "optimizer:cpu", "param:cpu", "optimizer:nvme", "param:nvme".
        nvme_paths: the folders of offloading to NVMe.
        secondary_partition: ranks over which ZeRO-3 shards a second copy of the weights (ZeRO++'s hpZ); 1 without one.
        context_parallel: how the ranks of a sequence see each other's keys: "ulysses", "allgather", "ring"
            (Accelerate's "alltoall"), or "" without dims.cp.
        pipeline_schedule: a key of `pipeline_schedules.SCHEDULES`; "" for another family than "schedule".
        fsdp_*, tp_sequence_parallel, other pipeline_*: the keys of these names, defaults filled in.
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
    secondary_partition: int = 1
    fsdp_forward_prefetch: bool = False
    fsdp_reduce_dtype: str = "fp32"
    tp_sequence_parallel: bool = False
    pipeline_partition: str = "parameters"
    pipeline_checkpoint_interval: int = 1
    context_parallel: str = ""
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
    def context_key(self) -> str:
        """The key of the Accelerate YAML that sets dims.cp."""
        return f"parallelism_config.parallelism_config_{'sp' if self.context_parallel == 'ulysses' else 'cp'}_size"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's states are outside of the device."""
        return any(each.startswith("optimizer:") for each in self.offload)

    @property
    def replicate_size(self) -> int:
        """Number of replicas of a sharded model (HSDP); 1 otherwise."""
        return self.dims.dp_replicate if self.family == "fsdp" else 1


@dataclass(frozen=True)
class Plan:
    """A run's recipe and strategy, and what the command line says about them.

    Attributes:
        recipe_path, overrides: as typed.
        resume: "auto", "none" or a checkpoint's folder.
        fresh: whether an earlier run's checkpoints may be moved aside.
        notes: lines for the user about keys that a later layer of the recipe has replaced.
        processes_to_start: number of ranks that this process starts (--num_processes); 0 if it is itself a rank.
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
