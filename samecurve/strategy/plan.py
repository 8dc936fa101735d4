"""A strategy as its files describe it, and the plan of a run."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

from samecurve.config.documents import Document
from samecurve.config.schema import Recipe
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.timetables import SCHEDULES, PipelineSchedule


@dataclass(frozen=True)
class Strategy:
    """Distribution of the run over processes, as written in the strategy's files; by default a single process.

    `accelerate` and `deepspeed` are what translation.py made of the files, whole for run.json and for the libraries
    themselves. Code reads the typed fields.

    Attributes:
        name: the file's stem, "single" when nothing was chosen.
        backend: who runs a step: "torch" | "deepspeed".
        sharding: what is sharded over dims.dp_shard x dims.cp: "none" | "fsdp" (FSDP2, of the whole model or, in a
            pipeline, of each stage) | "zero1" | "zero2" | "zero3".
        schedule: the pipeline of dims.pp stages: "" without one, "deepspeed", or a key of
            `timetables.SCHEDULES`, which PyTorch runs.
        distributed: whether the processes form a group; a group may have one process.
        path, accelerate: the Accelerate YAML and its content; None and {} for plain python and a bare DeepSpeed JSON.
        deepspeed_path, deepspeed: the DeepSpeed JSON and its content; None without DeepSpeed. The content is made from
            the YAML's keys, and has no path, where the YAML names no JSON.
        launcher: see `launchers.Launch`.
        world_size: number of processes.
        dims: how the processes are arranged; wrong numbers of processes have been reported before anything reads it.
        offload: what leaves the device and where to: "optimizer:cpu", "param:cpu", "optimizer:nvme", "param:nvme".
        nvme_paths: the folders of offloading to NVMe.
        secondary_partition: ranks over which ZeRO-3 shards a second copy of the weights (ZeRO++'s hpZ); 1 without one.
        context_parallel: how the ranks of a sequence see each other's keys: "ulysses", "allgather", "ring"
            (Accelerate's "alltoall"), or "" without dims.cp.
        fsdp_*, tp_sequence_parallel, pipeline_*: the keys of these names, defaults filled in.
    """

    name: str = "single"
    backend: str = "torch"
    sharding: str = "none"
    schedule: str = ""
    distributed: bool = False
    path: Path | None = None
    accelerate: dict = field(default_factory=dict)
    deepspeed_path: Path | None = None
    deepspeed: dict | None = None
    launcher: str = "python"
    world_size: int = 1
    dims: ParallelDims = ParallelDims()
    offload: tuple[str, ...] = ()
    nvme_paths: tuple[Path, ...] = ()
    secondary_partition: int = 1
    fsdp_forward_prefetch: bool = False
    fsdp_reduce_dtype: str = "fp32"
    tp_sequence_parallel: bool = False
    pipeline_partition: str = "parameters"
    pipeline_checkpoint_interval: int = 1
    context_parallel: str = ""

    @property
    def file(self) -> Path | None:
        """The file that was chosen."""
        return self.path or self.deepspeed_path

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage of ZeRO; 0 without."""
        return int(self.sharding[-1]) if self.sharding.startswith("zero") else 0

    @property
    def torch_schedule(self) -> PipelineSchedule | None:
        """The schedule of a pipeline that PyTorch runs; None for DeepSpeed's and without a pipeline."""
        return SCHEDULES.get(self.schedule)

    @property
    def shards_model(self) -> bool:
        """Whether FSDP2 shards the model as a whole; the stages of a pipeline are sharded one by one."""
        return self.sharding == "fsdp" and not self.schedule

    @property
    def shards_weights(self) -> bool:
        """Whether a rank keeps only a shard of each of its weights between two steps."""
        return self.sharding in ("fsdp", "zero3")

    @property
    def keeps_model(self) -> bool:
        """Whether PyTorch trains the whole model on every device, on one or as DDP's replicas."""
        return self.backend == "torch" and self.sharding == "none" and self.dims.size("pp", "tp") == 1

    @property
    def family(self) -> str:
        """One word for backend, sharding and pipeline, which run.json has."""
        if self.backend == "deepspeed":
            return "pipeline" if self.schedule else "zero"
        if self.schedule or self.sharding != "none":
            return "schedule" if self.schedule else "fsdp"
        return "tp" if self.dims.tp > 1 else "ddp" if self.distributed else "single"

    @property
    def context_key(self) -> str:
        """The key of the Accelerate YAML that sets dims.cp."""
        return f"parallelism_config.parallelism_config_{'sp' if self.context_parallel == 'ulysses' else 'cp'}_size"

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's states are outside of the device."""
        return any(target.startswith("optimizer:") for target in self.offload)

    @property
    def replicate_size(self) -> int:
        """Number of replicas of a sharded model (HSDP); 1 otherwise."""
        return self.dims.dp_replicate if self.shards_model else 1


@dataclass(frozen=True)
class Plan:
    """A run's recipe and strategy, and what the command line says about them.

    Attributes:
        recipe_path, overrides: as typed.
        resume: "auto", "none" or a checkpoint's folder.
        fresh: whether an earlier run's checkpoints may be moved aside.
        notes: lines for the user about keys that a later layer of the recipe has replaced, and about the strategy's
            files.
        from_strategy: recipe keys whose values are the strategy file's, with the place where each stands.
        no_effect: keys of the strategy's files that change nothing, with the reasons.
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
    from_strategy: dict[str, str] = field(default_factory=dict)
    no_effect: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Statement:
    """What a strategy's file says about a key of the recipe.

    Attributes:
        by: the recipe's key; `accelerate_keys.ACCUMULATION` for a number of accumulation steps.
        values: the values of that key which agree with the file, the preferred one first.
        document, path: where it stands; `written` is the value there.
        auto: whether "auto" would leave it to the recipe.
        weak: whether a value that the recipe gives counts without a conflict.
    """

    by: str
    values: tuple
    document: Document
    path: tuple[str, ...]
    written: object
    auto: bool = False
    weak: bool = False


@dataclass(frozen=True)
class Files:
    """The strategy's documents, with their keys as translation.py has read them; an absent one has no name.

    Attributes:
        written: the Accelerate YAML's content as it is in the file.
        statements: what the files say about keys of the recipe.
        no_effect: the reason why a key changes nothing here, by its dotted name.
        notes: lines for the user about what was read in another way than it is written.
    """

    accelerate: Document
    deepspeed: Document
    written: dict = field(default_factory=dict)
    statements: tuple[Statement, ...] = ()
    no_effect: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def resolve_auto(plan: Plan) -> dict:
    """Return the DeepSpeed config with the recipe's numbers: batch, accumulation, clipping, precision.

    The "pipeline" block is ours (DeepSpeed reads no stages from JSON), so it is left out.
    """
    recipe, strategy = plan.recipe, plan.strategy
    assert strategy.deepspeed is not None  # only the DeepSpeed engines call this
    config = copy.deepcopy(strategy.deepspeed)  # run.json has the file's content as it is
    config.pop("pipeline", None)
    micro, steps = recipe.batch.micro_batch_size, recipe.batch.accumulation_steps(strategy.dims.dp)
    # DeepSpeed wants the product; its engines get fewer rows where the global batch does not divide evenly
    config["train_batch_size"] = micro * steps * strategy.dims.dp
    config["train_micro_batch_size_per_gpu"] = micro
    config["gradient_accumulation_steps"] = steps
    config["gradient_clipping"] = recipe.optimizer.max_grad_norm
    config.setdefault("zero_optimization", {"stage": 0})
    config["zero_allow_untested_optimizer"] = True  # DeepSpeed's word for an optimizer that the caller made
    for precision in ("bf16", "fp16"):
        config[precision] = {**config.get(precision, {}), "enabled": recipe.precision == precision}
    # the same rule as engines/torch_engine.py where the JSON says nothing, so that the same steps are skipped
    config["fp16"] = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1, **config["fp16"]}
    return config
