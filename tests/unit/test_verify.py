from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from samecurve.config.schema import Recipe
from samecurve.engines.verify import verify
from samecurve.errors import TopologyError
from samecurve.interfaces.engine import EngineDescription
from samecurve.strategy.parallel_dims import ParallelDims

RECIPE = Recipe(
    output_dir="runs/x",
    steps=1,
    precision="bf16",
    model={"config": {"model_type": "llama"}},
    data={"path": "x"},
    batch={"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 16},
    optimizer={"learning_rate": 1e-3, "max_grad_norm": 0.5},
)
STRATEGY = SimpleNamespace(
    name="zero3",
    family="zero",
    world_size=2,
    data_parallel_size=2,
    pipeline_stages=1,
    zero_stage=3,
    replicate_size=1,
    tensor_parallel_size=1,
    secondary_partition=1,
    dims=ParallelDims(dp_shard=2),
    context_parallel="",
    tp_sequence_parallel=False,
    offload=("optimizer:cpu",),
)
RUNNING = EngineDescription(
    engine="DeepSpeedEngine",
    optimizer="DeepSpeedZeroOptimizer_Stage3",
    world_size=2,
    data_parallel_size=2,
    device="cpu",
    num_parameters=10,
    num_trained_parameters=10,
    num_parameters_per_rank=5,
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    gradient_clipping=0.5,
    precision="bf16",
    weight_dtype="bfloat16",
    reduce_dtype=None,
    zero_stage=3,
    sharded=True,
    offload=("optimizer:cpu",),
)


def plan(**strategy) -> SimpleNamespace:
    return SimpleNamespace(recipe=RECIPE, strategy=SimpleNamespace(**{**vars(STRATEGY), **strategy}))


def test_what_was_asked_for_passes():
    verify(plan(), RUNNING)


@pytest.mark.parametrize(
    ("key", "running"),
    [
        ("engine", "DistributedDataParallel"),
        ("world_size", 1),
        ("data_parallel_size", 1),
        ("pipeline_stages", 2),
        ("micro_batch_size", 4),
        ("gradient_accumulation_steps", 1),
        ("gradient_clipping", 1.0),
        ("precision", "fp32"),
        ("weight_dtype", "float32"),
        ("zero_stage", 2),
        ("sharded", False),
        ("replicate_size", 2),
        ("tensor_parallel_size", 2),
        ("context_parallel_size", 2),
        ("context_parallel", "ulysses"),
        ("tp_sequence_parallel", True),
        ("offload", ()),
    ],
)
def test_a_difference_names_both_values(key, running):
    with pytest.raises(TopologyError) as error:
        verify(plan(), replace(RUNNING, **{key: running}))
    assert str(error.value) == (
        "strategy zero3: what runs is not what was asked for\n"
        f"  {key}: asked for {getattr(RUNNING, key)!r}, but {running!r} runs"
    )
    assert error.value.exit_code == 6


def test_fsdp_that_did_not_shard_is_told():
    running = replace(RUNNING, engine="LlamaForCausalLM", zero_stage=0, weight_dtype="float32")
    fsdp = plan(name="fsdp", family="fsdp", zero_stage=0)
    verify(fsdp, running)
    with pytest.raises(TopologyError, match="sharded: asked for True, but False runs"):
        verify(fsdp, replace(running, sharded=False))
