"""Comparison of the live engine with the requested configuration: Accelerate and DeepSpeed fall back silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samecurve.errors import TopologyError
from samecurve.specs.precision import DTYPES

if TYPE_CHECKING:
    from samecurve.interfaces.engine import EngineDescription
    from samecurve.strategy.plan import Plan

_WRAPPERS = {"ddp": "DistributedDataParallel", "zero": "DeepSpeedEngine", "pipeline": "PipelineEngine"}


def verify(plan: Plan, running: EngineDescription) -> None:
    """Raise TopologyError (exit code 6) with both values of every difference between the plan and the live engine."""
    asked = _asked(plan)
    differences = [
        f"  {key}: asked for {value!r}, but {getattr(running, key)!r} runs"
        for key, value in asked.items()
        if getattr(running, key) != value
    ]
    if differences:
        raise TopologyError(
            f"strategy {plan.strategy.name}: what runs is not what was asked for\n" + "\n".join(differences)
        )


def _asked(plan: Plan) -> dict:
    recipe, strategy = plan.recipe, plan.strategy
    shards_stages = strategy.family == "schedule" and strategy.dims.dp_shard > 1
    asked = {
        "world_size": strategy.world_size,
        "data_parallel_size": strategy.data_parallel_size,
        "pipeline_stages": strategy.pipeline_stages,
        "micro_batch_size": recipe.batch.micro_batch_size,
        "gradient_accumulation_steps": recipe.batch.accumulation_steps(strategy.data_parallel_size),
        "gradient_clipping": recipe.optimizer.max_grad_norm,
        "precision": recipe.precision,
        "zero_stage": strategy.zero_stage,
        "secondary_partition": strategy.secondary_partition,
        "sharded": strategy.family == "fsdp" or strategy.zero_stage == 3 or shards_stages,
        "replicate_size": strategy.replicate_size,
        "tensor_parallel_size": strategy.tensor_parallel_size,
        "context_parallel_size": strategy.dims.cp,
        "expert_parallel_size": strategy.dims.ep,
        "context_parallel": strategy.context_parallel,
        "tp_sequence_parallel": strategy.tp_sequence_parallel,
        "offload": tuple(strategy.offload),
    }
    if strategy.family in _WRAPPERS:
        asked["engine"] = _WRAPPERS[strategy.family]
    if strategy.family == "schedule":
        asked["engine"] = f"Schedule{strategy.pipeline_schedule}"  # PyTorch's class
    if strategy.family in ("zero", "pipeline"):
        asked["weight_dtype"] = DTYPES[recipe.precision]
    return asked
