"""Comparison of the live engine with the requested configuration: Accelerate and DeepSpeed fall back silently."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from samecurve.errors import TopologyError
from samecurve.specs.precision import DTYPES
from samecurve.strategy.parallel_dims import FSDP

if TYPE_CHECKING:
    from samecurve.interfaces.engine import EngineDescription
    from samecurve.strategy.plan import Plan

_TOLERANCE = 0.1  # of the share of a rank


def verify(plan: Plan, running: EngineDescription, shapes: Iterable[Sequence[int]], whole: int = 0) -> None:
    """Compare the live engine with the plan.

    Args:
        plan: what was asked for.
        running: what runs.
        shapes: full shape of every weight of the model, frozen ones included, but those that no strategy cuts.
        whole: number of parameters in these.

    Raises:
        TopologyError: with both values of every difference (exit code 6).
    """
    differences = [
        f"  {key}: asked for {value!r}, but {getattr(running, key)!r} runs"
        for key, value in _asked(plan).items()
        if getattr(running, key) != value
    ]
    dims = plan.strategy.dims
    asked = {name: size for name, size in dims.sizes.items() if size > 1}
    if [*running.mesh.items()] != [*asked.items()]:  # in this order, too
        differences += [f"  mesh: asked for {asked!r}, but {running.mesh!r} runs"]
    if running.dims.ep != dims.ep:
        differences += [f"  ranks that share the experts: asked for {dims.ep}, but {running.dims.ep} runs"]
    share = expected_share(plan, shapes)
    if not isinstance(share, str) and not share[0] <= running.num_parameters_per_rank - whole <= share[1]:
        ends = f"{math.ceil(share[0] + whole):,} to {math.floor(share[1] + whole):,}"
        differences += [f"  num_parameters_per_rank: asked for {ends}, but {running.num_parameters_per_rank:,} runs"]
    if differences:
        raise TopologyError(
            f"strategy {plan.strategy.name}: what runs is not what was asked for\n" + "\n".join(differences)
        )


def expected_share(plan: Plan, shapes: Iterable[Sequence[int]]) -> tuple[float, float] | str:
    """Return the fewest and the most parameters that a rank may hold, within 10 %; the reason where that is unknown.

    FSDP2 divides the rows of a weight: with 5 rows, four ranks have 2, 2, 1 and 0. ZeRO-3 pads the last part. Tensor
    parallelism cuts matrices; each rank has all of some vectors (norms), and of experts that other ranks share.
    """
    strategy, dims, recipe = plan.strategy, plan.strategy.dims, plan.recipe
    if dims.pp > 1:
        return "stages differ in size"
    if recipe.adapter.name and dims.tp > 1:
        return "tensor parallelism cuts one of an adapter's two matrices"
    ranks = dims.size(*FSDP) if strategy.shards_weights else 1
    fewest = most = 0.0
    for shape in shapes:
        by_row = strategy.shards_model and len(shape) > 0  # ZeRO-3 divides elements
        rows, width = (shape[0], math.prod(shape[1:])) if by_row else (math.prod(shape), 1)
        # tensor parallelism has cut columns or rows before, or nothing
        ways = [_parts(rows, ranks, width / dims.tp)]
        ways += [_parts(math.ceil(rows / dims.tp), ranks, width)] if len(shape) < 3 else []
        ways += [_parts(rows, ranks, width)] if len(shape) != 2 else []
        padded = strategy.zero_stage == 3
        fewest += min(largest if padded else smallest for smallest, largest in ways)
        most += max(largest for _, largest in ways)
    return fewest * (1 - _TOLERANCE), most * (1 + _TOLERANCE)


def _parts(rows: int, ranks: int, width: float) -> tuple[float, float]:
    """Return the number of values in the smallest and in the largest part of a weight's rows over some ranks."""
    largest = math.ceil(rows / ranks)
    return max(rows - (ranks - 1) * largest, 0) * width, largest * width


def _asked(plan: Plan) -> dict:
    recipe, strategy = plan.recipe, plan.strategy
    asked = {
        "world_size": strategy.world_size,
        "micro_batch_size": recipe.batch.micro_batch_size,
        "gradient_accumulation_steps": recipe.batch.accumulation_steps(strategy.dims.dp),
        "gradient_clipping": recipe.optimizer.max_grad_norm,
        "precision": recipe.precision,
        "zero_stage": strategy.zero_stage,
        "secondary_partition": strategy.secondary_partition,
        "sharded": strategy.shards_weights,
        "context_parallel": strategy.context_parallel,
        "tp_sequence_parallel": strategy.tp_sequence_parallel,
        "offload": tuple(strategy.offload),
    }
    if strategy.torch_schedule:
        asked["engine"] = f"Schedule{strategy.schedule}"  # PyTorch's class
    elif strategy.backend == "deepspeed":
        asked["engine"] = "PipelineEngine" if strategy.schedule else "DeepSpeedEngine"
        asked["weight_dtype"] = DTYPES[recipe.precision]
    elif strategy.keeps_model and strategy.world_size > 1:  # Accelerate wraps that of one process on a CPU alone
        asked["engine"] = "DistributedDataParallel"
    return asked
