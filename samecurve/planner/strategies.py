"""Turns a recipe, a strategy file and a cluster into a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samecurve.config.documents import format_problems
from samecurve.config.schema_training import Batch
from samecurve.config.source import RecipeSource
from samecurve.errors import ConfigurationError
from samecurve.planner.cluster import Cluster
from samecurve.planner.job import Job, StateBytes
from samecurve.planner.layout import Layout
from samecurve.planner.shape import ModelShape
from samecurve.strategy import resolve, validate
from samecurve.strategy import world_size as world_size_rules
from samecurve.strategy.launchers import Launch
from samecurve.strategy.plan import Strategy

FOLDER = Path(__file__).resolve().parents[2] / "configs"
# Order among equally fast strategies: those with fewer moving parts first.
SIMPLE_FIRST = ("single", "ddp", "zero1", "zero2", "fsdp", "zero3", "hsdp", "tp", "fsdp_tp", "pipeline")
ADAM, SIXTEEN, THIRTY_TWO = 8, 2, 4


@dataclass(frozen=True)
class Wanted:
    """What is trained, apart from strategy and machines. `recipe` reads it anew, for rules that it must keep."""

    shape: ModelShape
    batch: Batch
    precision: str = "bf16"
    checkpointing: str = "none"
    chunked_loss: bool = True
    optimizer_bytes: int = ADAM
    recipe: Callable[[], RecipeSource] | None = None


def read(path: str, world_size: int) -> Strategy:
    """Read a strategy file for a number of processes. Raises ConfigurationError."""
    files = resolve.read_files(path)
    problems = [*files.accelerate.problems, *files.deepspeed.problems]
    if problems:
        raise ConfigurationError(format_problems(problems))
    return resolve.describe_strategy(files, Launch("torchrun", world_size))


def check(path: str, world_size: int, source: RecipeSource | None) -> None:
    """Apply the rules of a training run to a strategy file and a recipe just read. Raises ValueError with problems.

    Without a recipe, only the number of processes is checked.
    """
    files, launch = resolve.read_files(path), Launch("torchrun", world_size)
    strategy = resolve.describe_strategy(files, launch)
    if source is None:
        problems = [*world_size_rules.world_problems(files, strategy, launch)]
    else:
        validate.check_strategy(source, files, strategy, launch)
        problems = [*source.document.problems, *files.accelerate.problems, *files.deepspeed.problems]
    if problems:
        raise ValueError(format_problems(problems))


def shipped() -> Sequence[str]:
    """List the strategy files of configs/, the simplest first."""

    def order(path: Path) -> tuple[int, str]:
        known = path.stem in SIMPLE_FIRST
        return SIMPLE_FIRST.index(path.stem) if known else len(SIMPLE_FIRST), path.stem

    return [f"configs/{path.name}" for path in sorted(FOLDER.glob("*.yaml"), key=order)]


def job(wanted: Wanted, strategy: Strategy, machines: Cluster) -> Job:
    """Describe the job. Raises ValueError where the strategy cannot use these GPUs."""
    gpus, stages = machines.gpus, strategy.pipeline_stages
    if strategy.family == "single" and gpus > 1:
        raise ValueError(f"a single process uses one of {gpus} GPUs")
    cut = strategy.tensor_parallel_size
    if strategy.family == "tp" and gpus != cut:
        raise ValueError(f"without FSDP, tensor parallelism over {cut} GPUs uses {cut} of {gpus}")
    if gpus % (stages * strategy.replicate_size * cut):
        sizes = f"{stages} stages x {strategy.replicate_size} replicas x {cut} tensor-parallel"
        raise ValueError(f"{gpus} GPUs do not divide by {sizes}")
    if stages > wanted.shape.layers:
        raise ValueError(f"{stages} stages need as many layers; the model has {wanted.shape.layers}")
    ranks = gpus // stages // cut
    zero = 3 if strategy.family == "fsdp" else strategy.zero_stage
    shard = ranks // strategy.replicate_size if zero else 1
    layout = Layout(ranks, tp=cut, pp=stages, schedule="1f1b" if stages > 1 else "", zero=zero, shard=shard)
    stack = {"zero": "deepspeed", "pipeline": "deepspeed", "fsdp": "fsdp2"}.get(strategy.family, strategy.family)
    # A rank with fewer rows than a micro-batch holds computes no others.
    rows = min(wanted.batch.micro_batch_size, wanted.batch.rows_per_rank(ranks)[0])
    return Job(
        wanted.shape, layout, machines.card, rows, wanted.batch.sequence_length,
        wanted.batch.accumulation_steps(ranks), _states(strategy, wanted), machines.kind,
        gpus_per_node=machines.gpus_per_node, node_gbit=machines.node_gbit, precision=wanted.precision,
        chunked_loss=wanted.chunked_loss and stages == 1, checkpointing=wanted.checkpointing, stack=stack,
    )  # fmt: skip


def _states(strategy: Strategy, wanted: Wanted) -> StateBytes:
    """Bytes per parameter. Torch's engines keep fp32 weights and autocast; DeepSpeed keeps 16-bit ones and a copy."""
    if strategy.family not in ("zero", "pipeline"):
        states = StateBytes(THIRTY_TWO, THIRTY_TWO, 0, 0, wanted.optimizer_bytes)
    elif wanted.precision == "fp32":
        states = StateBytes(THIRTY_TWO, THIRTY_TWO, 0, THIRTY_TWO, wanted.optimizer_bytes)
    else:
        states = StateBytes(SIXTEEN, SIXTEEN, THIRTY_TWO, THIRTY_TWO, wanted.optimizer_bytes)
    if any(each.startswith("optimizer:") for each in strategy.offload):
        states = replace(states, master=0, optimizer=0)
    if any(each.startswith("param:") for each in strategy.offload):
        states = replace(states, weights=0)
    return states
