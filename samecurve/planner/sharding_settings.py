"""Settings of how weights and gradients travel, from a strategy's files and the libraries' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samecurve.planner.job import Sharding
from samecurve.strategy.plan import Strategy

SIXTEEN, THIRTY_TWO = 2, 4
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
        found = keys.get(key, default)
        return AUTO[key](hidden) if found == "auto" else found

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
