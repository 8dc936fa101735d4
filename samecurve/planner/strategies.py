"""Strategy files whose sizes a plan may change, and the job that a recipe, a strategy and a cluster make together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from samecurve.config.documents import ConfigProblem, Document, KeyPath, format_problems
from samecurve.errors import ConfigurationError
from samecurve.planner.cluster import Cluster
from samecurve.planner.inputs import ADAM, GATHERING, SEARCHED, PlanRequest
from samecurve.planner.job import Job, Sharding, StateBytes
from samecurve.planner.stages import divide
from samecurve.specs.environment import ROOT
from samecurve.specs.model_families import PIPELINED, allow, families, may_be_tried
from samecurve.strategy import resolve, validate
from samecurve.strategy.launchers import Launch
from samecurve.strategy.plan import Files, Strategy
from samecurve.strategy.recipe_values import fill_recipe
from samecurve.strategy.timetables import SCHEDULES, micro_batch_rule

FOLDER = ROOT / "configs"
# Order among equally fast strategies: those with fewer moving parts first.
SIMPLE_FIRST = (
    *("single", "ddp", "zero1", "zero2", "fsdp", "zero3", "zero3_hpz", "hsdp", "tp", "fsdp_tp", "fsdp_ulysses"),
    *("fsdp_cp", "fsdp_ep", "fsdp_tp_cp", "fsdp_ep_tp", "pipeline", "pipeline_1f1b", "pipeline_gpipe"),
    *("pipeline_interleaved", "pipeline_zbv", "pipeline_dualpipev", "pipeline_fsdp", "pp_fsdp_tp"),
)


def _parallelism(name: str) -> KeyPath:
    return "parallelism_config", f"parallelism_config_{name}"


ULYSSES = _parallelism("sp_size")
# Keys of a strategy's files that set a size: the axis, the file and the key. All other ranks form replicas or shards.
SIZES: tuple[tuple[str, str, KeyPath], ...] = (
    ("pp", "deepspeed", ("pipeline", "stages")),
    ("pp", "accelerate", _parallelism("pp_size")),
    ("dp_replicate", "accelerate", _parallelism("dp_replicate_size")),
    ("cp", "accelerate", _parallelism("cp_size")),
    ("cp", "accelerate", ULYSSES),
    ("tp", "accelerate", _parallelism("tp_size")),
    ("ep", "accelerate", _parallelism("ep_size")),
    ("hpz", "deepspeed", ("zero_optimization", "zero_hpz_partition_size")),
    ("tp_sequence", "accelerate", _parallelism("tp_sequence_parallel")),
)


@dataclass(frozen=True, eq=False)
class Template:
    """A strategy's files, whose parallel sizes a plan may change."""

    path: str
    files: Files

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @cached_property
    def places(self) -> dict[str, tuple[str, KeyPath]]:
        """File and key of each size that the files set; a switch of sequence parallelism beside tensor parallelism."""
        known = {axis: (file, key) for axis, file, key in SIZES if getattr(self.files, file).get(*key) is not None}
        return {**known, **({"tp_sequence": SIZES[-1][1:]} if "tp" in known else {})}

    @cached_property
    def own_sizes(self) -> dict[str, int]:
        """The files' own sizes; 0 where they do not say a positive whole number, a switch as False or True."""
        values = {axis: getattr(self.files, file).get(*key) for axis, (file, key) in self.places.items()}
        return {
            axis: value is True if axis == "tp_sequence" else value if type(value) is int and value > 0 else 0
            for axis, value in values.items()
        }

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that a rank holds."""
        schedule = self.files.accelerate.get(*_parallelism("pp_schedule"))
        return SCHEDULES[schedule].stages_per_rank if schedule in SCHEDULES else 1

    @property
    def by_heads(self) -> bool:
        """Whether ranks exchange sequence for heads."""
        return self.files.accelerate.get(*ULYSSES) is not None

    def sized(self, sizes: Mapping[str, int]) -> Files:
        """Return the files with other parallel sizes."""
        # problems of one size must not add up in the files that other sizes are made from
        changed = {
            name: replace(document, content=copy.deepcopy(document.content), problems=[])
            for name, document in (("accelerate", self.files.accelerate), ("deepspeed", self.files.deepspeed))
        }
        for axis, size in sizes.items():
            file, (*blocks, key) = self.places[axis]
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


def filling(template: Template, gpus: int, taken: dict[str, str]) -> Callable[[Document], None]:
    """Return what writes values of a strategy's files into a recipe that lacks them, see `recipe_values.fill_recipe`.

    `taken` gets their places.
    """
    ranks = resolve.describe_strategy(template.files, Launch("torchrun", gpus)).dims.dp
    return lambda document: taken.update(fill_recipe(document, template.files, ranks))


def shipped() -> list[Template]:
    """Read the strategies of configs/, the simplest first: what this version can run."""
    paths = sorted(FOLDER.glob("*.yaml"), key=lambda path: (simplicity(path.stem), path.stem))
    return [read(resolve.strategy_path(path.stem)) for path in paths]


def simplicity(name: str) -> int:
    """Rank of a strategy by its moving parts, 0 for the simplest."""
    return SIMPLE_FIRST.index(name) if name in SIMPLE_FIRST else len(SIMPLE_FIRST)


SIXTEEN, THIRTY_TWO = 2, 4
TORCH_STATES = StateBytes(THIRTY_TWO, THIRTY_TWO, 0, 0, ADAM)


def describe(
    request: PlanRequest, template: Template, sizes: Mapping[str, int], gpus: int
) -> tuple[Strategy, list[ConfigProblem]]:
    """Return the strategy on a number of GPUs, and what the configuration's check finds wrong with it.

    Args:
        request: the job. Problems of its recipe alone are left out.
        sizes: of the axes that the files set, by name.
    """
    files, launch = template.sized(sizes), Launch("torchrun", gpus)
    strategy = resolve.describe_strategy(files, launch)
    # without the recipe's own problems: its data may lie on the machines that are planned for
    source = request.source._replace(document=replace(request.source.document, problems=[]))
    validate.check_strategy(source, files, strategy, launch)
    problems = [*files.accelerate.problems, *files.deepspeed.problems, *source.document.problems]
    # `takes` judges what a search puts in their place
    searched = {".".join(path) for name, path in SEARCHED.items() if name not in request.fixed}
    problems = [problem for problem in problems if problem.key not in searched]
    for axis, text in _model_problems(request, strategy):
        file, key = template.places[axis]
        problems.append(ConfigProblem(getattr(files, file).place(key), ".".join(key), text))
    # how DeepSpeed's pipeline would divide the layers, which a run finds out when it builds its stage
    if strategy.schedule == "deepspeed":
        partition = strategy.pipeline_partition
        layers = divide(request.shape, strategy.dims.pp, partition)
        if min(layers) == 0:
            empty = f"stage {layers.index(0)} of {len(layers)} without a decoder layer ({layers})"
            fix = 'use "uniform" or "type:decoder", or fewer pipeline.stages'
            text = f"found {partition!r}, which leaves {empty}; {fix}"
            place = files.deepspeed.place(("pipeline", "partition"))
            problems.append(ConfigProblem(place, "pipeline.partition", text))
    return strategy, problems


def _model_problems(request: PlanRequest, strategy: Strategy) -> list[tuple[str, str]]:
    """Judge what a run finds out when it builds the model: (axis, problem)."""
    dims, family, experts = strategy.dims, request.family, request.shape.experts
    problems, recipe = [], request.source.recipe
    uses: list[str] | None = [] if recipe and recipe.model.unproven else None
    if dims.ep > 1 and (not experts or experts % dims.ep):
        count = f"the model has {experts} experts, which {dims.ep} does not divide"
        problems.append(("ep", f"found {dims.ep}, but {count if experts else 'the model has no experts'}"))
    spreads = dims.ep > 1 and experts > 0
    known = {
        "pp": PIPELINED if strategy.torch_schedule else (),
        "tp": families("expert_and_tensor_parallel") if spreads else families("tensor_parallel"),
        "cp": families("context_parallel"),
        "ep": families("expert_parallel") if spreads else (),
    }
    if dims.tp > 1:
        problems += _indivisible(request, strategy, cuts_mlp=not spreads)
    problems += _exchanged(request, strategy)
    for axis, names in known.items():
        if family and names and dims.size(axis) > 1 and family not in names:
            text = f"found {dims.size(axis)}, but a {family} is not among the families {', '.join(sorted(names))}"
            try:
                allow(uses, axis, text, fails=not may_be_tried(axis, family))
            except ConfigurationError as error:
                problems.append((axis, str(error)))
    return problems


def _exchanged(request: PlanRequest, strategy: Strategy) -> Iterator[tuple[str, str]]:
    """Yield heads and experts that their ranks cannot divide, as context_parallel's and expert_parallel's checks do."""
    shape, dims = request.shape, strategy.dims
    if strategy.context_parallel == "ulysses" and shape.heads // dims.tp % dims.cp:
        share = f", {shape.heads // dims.tp} on a rank of tensor parallelism" if dims.tp > 1 else ""
        text = f"but the model has {shape.heads} attention heads{share}, which {dims.cp} does not divide"
        yield "cp", f"found {dims.cp}, {text}"
    own, ranks = shape.experts // dims.ep, dims.efsdp
    for rows in (shape.ffn * (2 if shape.gated else 1), shape.hidden) if dims.ep > 1 and own else ():
        if own % ranks and rows % ranks:
            text = f"found {dims.ep}, but {ranks} ranks hold the same {own} experts of {rows} rows"
            yield "ep", f"{text}, and {ranks} divides neither"


def _indivisible(request: PlanRequest, strategy: Strategy, cuts_mlp: bool) -> Iterator[tuple[str, str]]:
    """Yield the sizes of the model that tensor parallelism cannot divide, as engines/tensor_parallel.check does."""
    shape, size, gathers = request.shape, strategy.dims.tp, request.family in GATHERING
    heads = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    counts = {"features": shape.hidden} if gathers else heads
    counts |= {"ids of the vocabulary": shape.vocab} | ({"features of an MLP": shape.ffn} if cuts_mlp else {})
    for name, count in counts.items():
        if count % size:
            yield "tp", f"found {size}, but the model has {count} {name}, which {size} does not divide"
    if gathers and strategy.tp_sequence_parallel:
        yield "tp", f"found sequence parallelism, but the layers of a {request.family} gather whole activations"


def job(request: PlanRequest, strategy: Strategy, machines: Cluster) -> Job:
    """Describe the job of a strategy that fits the number of GPUs.

    A rank with fewer rows than a micro-batch holds computes no others.
    """
    dims, recipe = strategy.dims, request.source.recipe
    stack = "deepspeed" if strategy.backend == "deepspeed" else "fsdp2" if strategy.shards_model else strategy.family
    once = recipe is not None and recipe.memory.gradient_sync == "last_micro_batch"
    # what carries activations: only tensor parallelism, schedules and fp16 have autocast
    flow = "copies" if stack in ("single", "ddp") and request.precision == "bf16" else "autocast"
    flow = "16-bit" if stack in ("fsdp2", "deepspeed") else flow
    flow = "fp32" if request.precision == "fp32" else flow
    # the ring has no mask, and gathered keys are computed by SDPA in place of varlen
    masked = request.attention == "sdpa" or (request.attention == "auto" and machines.kind != "cpu")
    if strategy.context_parallel in ("ring", "allgather"):
        masked = strategy.context_parallel == "allgather"
    return Job(
        request.shape, strategy, machines.card, min(request.batch.micro_batch_size, request.rows_of_a_rank(dims.dp)),
        request.batch.sequence_length, request.batch.accumulation_steps(dims.dp), _states(strategy, request),
        machines.kind, gpus_per_node=machines.gpus_per_node,
        precision="fp8" if request.fp8 else request.precision, fp8_recipe=request.fp8, compile=request.compile,
        # the last stage of DeepSpeed's pipeline computes whole logits
        chunked_loss=request.chunked_loss and (dims.pp == 1 or stack != "deepspeed"),
        checkpointing=request.checkpointing, stack=stack, levels=machines.levels, host=machines.host,
        reserved_gib=machines.file.reserved_gib, memory_kind="resident" if machines.kind == "cpu" else "",
        calibration=machines.calibration, flash=request.attention != "eager", flow=flow,
        masked=masked,
        sharding=sharding(strategy, request.precision, request.shape.hidden, once),
        virtual_stages=strategy.torch_schedule.stages_per_rank if strategy.torch_schedule else 1,
        frozen=request.frozen, teacher=request.teacher, sequences=request.sequences,
    )  # fmt: skip


def _states(strategy: Strategy, request: PlanRequest) -> StateBytes:
    """Bytes per parameter. Torch's engines keep fp32 weights; DeepSpeed keeps 16-bit ones and a copy."""
    if strategy.backend == "torch":
        states = TORCH_STATES
    elif request.precision == "fp32":
        states = StateBytes(THIRTY_TWO, THIRTY_TWO, 0, THIRTY_TWO, ADAM)
    else:
        states = StateBytes(SIXTEEN, SIXTEEN, THIRTY_TWO, THIRTY_TWO, ADAM)
    states = replace(states, optimizer=request.optimizer_bytes, average=request.average_bytes)
    if request.frozen:
        states = StateBytes(*(request.frozen.trained * number for number in vars(states).values()))
        states = replace(states, weights=states.weights + request.frozen.weight_bytes)
    if strategy.offloads_optimizer:
        states = replace(states, master=0, optimizer=0)
    if any(target.startswith("param:") for target in strategy.offload):
        states = replace(states, weights=0)
    return states


def takes(request: PlanRequest, strategy: Strategy) -> bool:
    """Whether a pipeline schedule takes a step's micro-batches and recomputation; other strategies take any."""
    if strategy.torch_schedule is None:
        return True
    count = request.batch.accumulation_steps(strategy.dims.dp)
    refused = micro_batch_rule(strategy.schedule, count, strategy.dims.pp)
    return not refused and strategy.torch_schedule.takes_recomputation(request.checkpointing)


# DeepSpeed 0.19's defaults that `Sharding` has not, and what Accelerate puts in place of "auto" for a hidden size h
BUFFERS, BUFFER_SIZE, BUCKET = 5, 1e8, 5e8
AUTO = {
    "reduce_bucket_size": lambda hidden: hidden**2,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden**2),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def sharding(strategy: Strategy, precision: str, hidden: int, reduces_once: bool) -> Sharding:
    """Read the settings of a strategy that has been checked.

    Args:
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

    usual = Sharding()
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
        persistent=number("stage3_param_persistence_threshold", usual.persistent),
        reuse_distance=number("stage3_max_reuse_distance", usual.reuse_distance),
        prefetched=min(
            number("stage3_prefetch_bucket_size", usual.prefetched), number("stage3_max_live_parameters", 1e9)
        ),
        weight_buffers=weights.get("buffer_count", BUFFERS) * weights.get("buffer_size", BUFFER_SIZE),
        state_buffers=states.get("buffer_count", usual.state_buffers),
        subgroup=number("sub_group_size", usual.subgroup),
    )
