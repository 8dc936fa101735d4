"""Strategy files whose sizes a plan may change: the shipped ones and those of users."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from samecurve.config.documents import ConfigProblem, Document, KeyPath, format_problems
from samecurve.config.source import RecipeSource
from samecurve.errors import ConfigurationError
from samecurve.planner.cluster import Cluster
from samecurve.planner.inputs import ADAM, Wanted
from samecurve.planner.job import Job, Sharding, StateBytes
from samecurve.planner.model_shape import ModelShape
from samecurve.planner.stages import divide
from samecurve.specs.model_families import PIPELINED, families
from samecurve.strategy import resolve, validate
from samecurve.strategy.launchers import Launch
from samecurve.strategy.pipeline_schedules import SCHEDULES, micro_batch_rule
from samecurve.strategy.plan import Files, Strategy

FOLDER = Path(__file__).resolve().parents[2] / "configs"
# Order among equally fast strategies: those with fewer moving parts first.
SIMPLE_FIRST = (
    *("single", "ddp", "zero1", "zero2", "fsdp", "zero3", "zero3_hpz", "hsdp", "tp", "fsdp_tp", "fsdp_ulysses"),
    *("fsdp_cp", "fsdp_ep", "fsdp_tp_cp", "fsdp_ep_tp", "pipeline", "pipeline_1f1b", "pipeline_gpipe"),
    *("pipeline_interleaved", "pipeline_zbv", "pipeline_dualpipev", "pipeline_fsdp", "pp_fsdp_tp"),
)
# Sizes that a strategy's files may set: which file, and the key. All other ranks form replicas or shards.
AXES: Mapping[str, tuple[str, KeyPath]] = {
    "pp": ("deepspeed", ("pipeline", "stages")),
    "dp_replicate": ("accelerate", ("parallelism_config", "parallelism_config_dp_replicate_size")),
    "cp": ("accelerate", ("parallelism_config", "parallelism_config_cp_size")),
    "tp": ("accelerate", ("parallelism_config", "parallelism_config_tp_size")),
    "ep": ("accelerate", ("parallelism_config", "parallelism_config_ep_size")),
    "hpz": ("deepspeed", ("zero_optimization", "zero_hpz_partition_size")),
    # a switch, which files with tensor parallelism may leave out
    "tp_sequence": ("accelerate", ("parallelism_config", "parallelism_config_tp_sequence_parallel")),
}
SCHEDULED = ("parallelism_config", "parallelism_config_pp_size")  # sets pp of PyTorch's schedules
ULYSSES = ("parallelism_config", "parallelism_config_sp_size")  # sets cp, too


@dataclass(frozen=True, eq=False)
class Template:
    """A strategy's files, whose parallel sizes a plan may change."""

    path: str
    files: Files

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The sizes that the files set, and `tp_sequence` beside tensor parallelism."""
        places = {axis: self.place(axis) for axis in AXES}
        present = [axis for axis, (file, key) in places.items() if getattr(self.files, file).get(*key) is not None]
        return tuple(dict.fromkeys([*present, *(["tp_sequence"] if "tp" in present else [])]))

    @property
    def own_sizes(self) -> dict[str, int]:
        """The files' own sizes of their axes."""
        return {axis: self.size(axis) for axis in self.axes}

    @property
    def is_scheduled(self) -> bool:
        """Whether the strategy is a pipeline by one of PyTorch's schedules."""
        return self.files.accelerate.get(*SCHEDULED) is not None

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that a rank holds."""
        schedule = self.files.accelerate.get("parallelism_config", "parallelism_config_pp_schedule")
        return SCHEDULES[schedule].stages_per_rank if schedule in SCHEDULES else 1

    @property
    def by_heads(self) -> bool:
        """Whether ranks exchange sequence for heads."""
        return self.files.accelerate.get(*ULYSSES) is not None

    def place(self, axis: str) -> tuple[str, KeyPath]:
        """Return the file and the key that set the size of an axis."""
        if axis == "pp" and self.is_scheduled:
            return "accelerate", SCHEDULED
        return ("accelerate", ULYSSES) if axis == "cp" and self.by_heads else AXES[axis]

    def size(self, axis: str) -> int:
        """The files' own size of an axis; 0 where they do not say a positive whole number, False for a switch."""
        file, key = self.place(axis)
        value = getattr(self.files, file).get(*key)
        if axis == "tp_sequence":
            return value is True
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    def sized(self, sizes: Mapping[str, int]) -> Files:
        """Return the files with other parallel sizes."""
        # problems of one size must not add up in the files that other sizes are made from
        changed = {
            name: replace(document, content=copy.deepcopy(document.content), problems=[])
            for name, document in (("accelerate", self.files.accelerate), ("deepspeed", self.files.deepspeed))
        }
        for axis, size in sizes.items():
            file, (*blocks, key) = self.place(axis)
            block = changed[file].content
            for name in blocks:
                block = block[name]
            block[key] = size
        return replace(self.files, **changed)


def read(path: str) -> Template:
    """Read a strategy's files. Raises ConfigurationError."""
    files = resolve.read_files(path)
    problems = [*files.accelerate.problems, *files.deepspeed.problems]
    if problems:
        raise ConfigurationError(format_problems(problems))
    return Template(path, files)


def shipped() -> list[Template]:
    """Read the strategies of configs/, the simplest first: what this version can run."""
    paths = sorted(FOLDER.glob("*.yaml"), key=lambda path: (simplicity(path.stem), path.stem))
    return [read(f"configs/{path.name}") for path in paths]


def simplicity(name: str) -> int:
    """Rank of a strategy by its moving parts, 0 for the simplest."""
    return SIMPLE_FIRST.index(name) if name in SIMPLE_FIRST else len(SIMPLE_FIRST)


# Turns a recipe, a strategy file and a cluster into a job, and judges whether this version can run it.


SIXTEEN, THIRTY_TWO = 2, 4
TORCH_STATES = StateBytes(THIRTY_TWO, THIRTY_TWO, 0, 0, ADAM)


def describe(
    wanted: Wanted, template: Template, sizes: Mapping[str, int], gpus: int
) -> tuple[Strategy, list[ConfigProblem]]:
    """Return the strategy on a number of GPUs, and what the configuration's check finds wrong with it.

    Args:
        wanted: the job. Problems of its recipe alone are left out.
        template: the strategy's files.
        sizes: sizes of the axes that the files set, by name.
        gpus: number of all ranks.
    """
    of_sizes = id(wanted.source), wanted.shape, wanted.family, template, *sizes.items()
    known = wanted.known.get(of_sizes) or wanted.known.get((*of_sizes, gpus))
    if not known:
        known = _describe(wanted, template, sizes, gpus)
        # what a file's sizes cannot be is so on any number of GPUs
        stays = any(problem.key.startswith("parallelism_config.") and not problem.topology for problem in known[1])
        wanted.known[of_sizes if stays else (*of_sizes, gpus)] = known
    return known


class _Remembered(RecipeSource):
    """A recipe whose values are looked up once, for rules that ask for the same ones about each strategy and size."""

    values: dict[str, Any]

    def value(self, dotted: str) -> Any:
        if dotted not in self.values:
            self.values[dotted] = super().value(dotted)
        return self.values[dotted]


def _describe(
    wanted: Wanted, template: Template, sizes: Mapping[str, int], gpus: int
) -> tuple[Strategy, list[ConfigProblem]]:
    files, launch = template.sized(sizes), Launch("torchrun", gpus)
    strategy = resolve.describe_strategy(files, launch)
    # without the recipe's own problems: its data may lie on the machines that are planned for
    source = _Remembered(*wanted.source._replace(document=replace(wanted.source.document, problems=[])))
    # the source is kept, so that no other one gets its id
    _, source.values = wanted.known.setdefault(id(wanted.source), (wanted.source, {}))
    validate.check_strategy(source, files, strategy, launch)
    problems = [*files.accelerate.problems, *files.deepspeed.problems, *source.document.problems]
    problems += _experts_problem(wanted.shape, files.accelerate, strategy.dims.ep)
    problems += _family_problems(wanted, template, strategy)
    return strategy, problems + _stages_problem(wanted.shape, files.deepspeed, strategy)


def _family_problems(wanted: Wanted, template: Template, strategy: Strategy) -> list[ConfigProblem]:
    """Judge which engines take the model's family, which a run finds out when it builds the model."""
    dims, family = strategy.dims, wanted.family
    spreads = dims.ep > 1 and wanted.shape.experts > 0
    known = {
        "pp": PIPELINED if strategy.torch_schedule else (),
        "tp": families("expert_and_tensor_parallel") if spreads else families("tensor_parallel"),
        "cp": families("context_parallel"),
        "ep": families("expert_parallel") if spreads else (),
    }
    problems = []
    for axis, names in known.items():
        if family and names and dims.size(axis) > 1 and family not in names:
            file, key = template.place(axis)
            text = f"found {dims.size(axis)}, but a {family} is not among the families {', '.join(sorted(names))}"
            problems.append(ConfigProblem(getattr(template.files, file).place(key), ".".join(key), text))
    return problems


def _experts_problem(shape: ModelShape, document: Document, size: int) -> list[ConfigProblem]:
    """Judge what a run finds out when it reads the model's config."""
    if size == 1 or (shape.experts and shape.experts % size == 0):
        return []
    count = shape.experts
    why = f"the model has {count} experts, which {size} does not divide" if count else "the model has no experts"
    _, key = AXES["ep"]
    return [ConfigProblem(document.place(key), ".".join(key), f"found {size}, but {why}")]


def _stages_problem(shape: ModelShape, document: Document, strategy: Strategy) -> list[ConfigProblem]:
    """Judge how DeepSpeed's pipeline would divide the layers, which a run finds out when it builds its stage."""
    partition = strategy.pipeline_partition
    held = divide(shape, strategy.dims.pp, partition) if strategy.schedule == "deepspeed" else [1]
    if min(held) > 0:
        return []
    why = f"found {partition!r}, which leaves stage {held.index(0)} of {len(held)} without a decoder layer ({held})"
    fix = 'use "uniform" or "type:decoder", or fewer pipeline.stages'
    return [ConfigProblem(document.place(("pipeline", "partition")), "pipeline.partition", f"{why}; {fix}")]


def job(wanted: Wanted, strategy: Strategy, machines: Cluster) -> Job:
    """Describe the job of a strategy that fits the number of GPUs.

    A rank with fewer rows than a micro-batch holds computes no others.
    """
    dims, recipe = strategy.dims, wanted.source.recipe
    stack = "deepspeed" if strategy.backend == "deepspeed" else "fsdp2" if strategy.shards_model else strategy.family
    once = recipe is not None and recipe.memory.gradient_sync == "last_micro_batch"
    # the files' contents are in `sharding`
    own = replace(strategy, path=None, accelerate={}, deepspeed_path=None, deepspeed=None, nvme_paths=())
    return Job(
        wanted.shape, own, machines.card, min(wanted.batch.micro_batch_size, wanted.rows_of_a_rank(dims.dp)),
        wanted.batch.sequence_length, wanted.batch.accumulation_steps(dims.dp), _states(strategy, wanted),
        machines.kind, gpus_per_node=machines.gpus_per_node, node_gbit=machines.node_gbit,
        precision="fp8" if wanted.fp8 else wanted.precision, fp8_recipe=wanted.fp8, compile=wanted.compile,
        # the last stage of DeepSpeed's pipeline computes whole logits
        chunked_loss=wanted.chunked_loss and (dims.pp == 1 or stack != "deepspeed"),
        checkpointing=wanted.checkpointing, stack=stack, levels=machines.levels, reserved_gib=machines.reserved_gib,
        host=machines.host, memory_kind="resident" if machines.kind == "cpu" else "",
        calibration=machines.calibration, flash=wanted.attention != "eager", flow=_flow(stack, wanted.precision),
        masked=_masked(wanted.attention, strategy, machines),
        sharding=sharding(strategy, wanted.precision, wanted.shape.hidden, once),
        virtual_stages=strategy.torch_schedule.stages_per_rank if strategy.torch_schedule else 1,
    )  # fmt: skip


def _flow(stack: str, precision: str) -> str:
    """Find what carries activations (`Job.flow`): only tensor parallelism, schedules and fp16 have autocast."""
    if precision == "fp32":
        return "fp32"
    if stack in ("fsdp2", "deepspeed"):
        return "16-bit"
    return "copies" if stack in ("single", "ddp") and precision == "bf16" else "autocast"


def _masked(attention: str, strategy: Strategy, machines: Cluster) -> bool:
    """Decide `Job.masked`. The ring has no mask, and gathered keys are computed by SDPA in place of varlen."""
    if strategy.context_parallel in ("ring", "allgather"):
        return strategy.context_parallel == "allgather"
    return attention == "sdpa" or (attention == "auto" and machines.kind != "cpu")


def _states(strategy: Strategy, wanted: Wanted) -> StateBytes:
    """Bytes per parameter. Torch's engines keep fp32 weights; DeepSpeed keeps 16-bit ones and a copy."""
    if strategy.backend == "torch":
        states = TORCH_STATES
    elif wanted.precision == "fp32":
        states = StateBytes(THIRTY_TWO, THIRTY_TWO, 0, THIRTY_TWO, ADAM)
    else:
        states = StateBytes(SIXTEEN, SIXTEEN, THIRTY_TWO, THIRTY_TWO, ADAM)
    states = replace(states, optimizer=wanted.optimizer_bytes)
    if strategy.offloads_optimizer:
        states = replace(states, master=0, optimizer=0)
    if any(target.startswith("param:") for target in strategy.offload):
        states = replace(states, weights=0)
    return states


def takes(wanted: Wanted, strategy: Strategy) -> bool:
    """Whether a pipeline schedule takes a step's micro-batches and recomputation; other strategies take any."""
    if strategy.torch_schedule is None:
        return True
    count = wanted.batch.accumulation_steps(strategy.dims.dp)
    refused = micro_batch_rule(strategy.schedule, count, strategy.dims.pp)
    return not refused and strategy.torch_schedule.takes_recomputation(wanted.checkpointing)


# DeepSpeed 0.19's defaults, and what Accelerate puts in place of "auto" for a hidden size h
BUFFERS, BUFFER_SIZE, STATE_BUFFERS, SUBGROUP = 5, 1e8, 4, 1e9
BUCKET, PREFETCHED, PERSISTENT, REUSE_DISTANCE = 5e8, 5e7, 1e5, 1e9
AUTO = {
    "reduce_bucket_size": lambda hidden: hidden**2,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden**2),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def sharding(strategy: Strategy, precision: str, hidden: int, reduces_once: bool) -> Sharding:
    """Read the settings of a strategy that has been checked.

    Args:
        precision: the recipe's.
        hidden: the model's hidden size.
        reduces_once: whether the recipe wants FSDP to reduce gradients once per step.
    """
    if strategy.torch_schedule:
        # stages reduce after the last backward pass, and FSDP2 gathers them in fp32 once per step
        once = {"reduces_once": True, "gathers_once": True, "reshards": False} if strategy.dims.dp_shard > 1 else {}
        return Sharding(gather_bytes=THIRTY_TWO, reduce_bytes=THIRTY_TWO, overlaps=False, **once)
    if strategy.shards_model:
        given = strategy.accelerate.get("fsdp_config", {})
        reduce_bytes = SIXTEEN if strategy.fsdp_reduce_dtype == "bf16" else THIRTY_TWO
        reshards = given.get("fsdp_reshard_after_forward") is not False
        return Sharding(reduce_bytes=reduce_bytes, reduces_once=reduces_once, reshards=reshards)
    if strategy.backend == "torch":
        return Sharding()
    return _deepspeed(strategy, precision, hidden)


def _deepspeed(strategy: Strategy, precision: str, hidden: int) -> Sharding:
    content, stage = strategy.deepspeed or {}, strategy.zero_stage
    keys: Mapping[str, Any] = content.get("zero_optimization", {})

    def number(key: str, default: float) -> float:
        value = keys.get(key, default)
        return AUTO[key](hidden) if value == "auto" else value

    weights, states = (keys.get(f"offload_{part}") or {} for part in ("param", "optimizer"))
    is_16_bit = precision != "fp32"
    reduce_bytes = SIXTEEN if is_16_bit and content.get("communication_data_type") != "fp32" else THIRTY_TWO
    beside = keys.get("overlap_comm")
    # ZeRO-1 in bf16 (BF16_Optimizer) and a pipeline reduce after the last backward pass
    after = bool(strategy.schedule) or (stage == 1 and precision == "bf16")
    overlaps = (stage == 3 if beside is None else beside) and not after
    buffers = 2 if strategy.schedule or (beside and stage < 3) else 1
    width = SIXTEEN if is_16_bit and stage == 2 else reduce_bytes if stage == 3 else THIRTY_TWO
    has_none = not stage or (stage == 1 and precision == "bf16")
    return Sharding(
        reduce_bytes=reduce_bytes,
        overlaps=overlaps,
        bucket_bytes=0 if has_none else buffers * number("reduce_bucket_size", BUCKET) * width,
        persistent=number("stage3_param_persistence_threshold", PERSISTENT),
        reuse_distance=number("stage3_max_reuse_distance", REUSE_DISTANCE),
        prefetched=min(
            number("stage3_prefetch_bucket_size", PREFETCHED), number("stage3_max_live_parameters", REUSE_DISTANCE)
        ),
        weight_buffers=weights.get("buffer_count", BUFFERS) * weights.get("buffer_size", BUFFER_SIZE),
        state_buffers=states.get("buffer_count", STATE_BUFFERS),
        subgroup=number("sub_group_size", SUBGROUP),
    )
