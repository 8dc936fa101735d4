from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from report_cases import missing

from samecurve.config.schema import Recipe
from samecurve.engines.verify import expected_share, verify
from samecurve.errors import TopologyError
from samecurve.interfaces.engine import EngineDescription
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Strategy

RECIPE = Recipe(
    output_dir="runs/x",
    steps=1,
    precision="bf16",
    model={"config": {"model_type": "llama"}},
    data={"path": "x"},
    batch={"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 16},
    optimizer={"learning_rate": 1e-3, "max_grad_norm": 0.5},
)
STRATEGY = Strategy(
    name="zero3",
    backend="deepspeed",
    sharding="zero3",
    distributed=True,
    world_size=2,
    dims=ParallelDims(dp_shard=2),
    offload=("optimizer:cpu",),
)
TORCH = {"backend": "torch", "sharding": "fsdp"}
RUNNING = EngineDescription(
    engine="DeepSpeedEngine",
    optimizer="DeepSpeedZeroOptimizer_Stage3",
    world_size=2,
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
    dims=ParallelDims(dp_shard=2),
    offload=("optimizer:cpu",),
)
SHAPES = [(3, 2), (4,)]  # 10 parameters


def plan(**strategy) -> SimpleNamespace:
    return SimpleNamespace(recipe=RECIPE, strategy=replace(STRATEGY, **strategy))


def test_what_was_asked_for_passes():
    verify(plan(), RUNNING, SHAPES)


@pytest.mark.parametrize(
    ("key", "running"),
    [
        ("engine", "DistributedDataParallel"),
        ("world_size", 1),
        ("micro_batch_size", 4),
        ("gradient_accumulation_steps", 1),
        ("gradient_clipping", 1.0),
        ("precision", "fp32"),
        ("weight_dtype", "float32"),
        ("zero_stage", 2),
        ("secondary_partition", 2),
        ("sharded", False),
        ("context_parallel", "ulysses"),
        ("tp_sequence_parallel", True),
        ("offload", ()),
    ],
)
def test_a_difference_names_both_values(key, running):
    with pytest.raises(TopologyError) as error:
        verify(plan(), replace(RUNNING, **{key: running}), SHAPES)
    assert str(error.value).startswith("strategy zero3: ")
    assert not missing(str(error.value), (f"{key}: ", f"{getattr(RUNNING, key)!r}, but {running!r} runs"))
    assert error.value.exit_code == 6


@pytest.mark.parametrize(
    ("dims", "told"),
    [
        (ParallelDims(), "mesh: asked for {'dp_shard': 2}, but {} runs"),
        (ParallelDims(dp_replicate=2), "mesh: asked for {'dp_shard': 2}, but {'dp_replicate': 2} runs"),
        (ParallelDims(dp_shard=2, tp=2), "mesh: asked for {'dp_shard': 2}, but {'dp_shard': 2, 'tp': 2} runs"),
        (ParallelDims(dp_shard=2, ep=2), "ranks that share the experts: asked for 1, but 2 runs"),
    ],
)
def test_another_mesh_is_told(dims, told):
    with pytest.raises(TopologyError) as error:
        verify(plan(), replace(RUNNING, dims=dims), SHAPES)
    assert str(error.value).endswith(f"\n  {told}")


def test_fsdp_that_did_not_shard_is_told():
    running = replace(RUNNING, engine="LlamaForCausalLM", zero_stage=0, weight_dtype="float32")
    fsdp = plan(name="fsdp", **TORCH)
    verify(fsdp, running, SHAPES)
    with pytest.raises(TopologyError, match="sharded: asked for True, but False runs"):
        verify(fsdp, replace(running, sharded=False), SHAPES)


def test_ddp_of_one_process_is_the_model_itself():
    """As Accelerate has it on a GPU; on a CPU it wraps the model in DDP nevertheless."""
    alone = {"world_size": 1, "dims": ParallelDims(), "offload": ()}
    asked = plan(name="ddp", backend="torch", sharding="none", **alone)
    running = replace(RUNNING, zero_stage=0, sharded=False, num_parameters_per_rank=10, **alone)
    for engine in ("LlamaForCausalLM", "DistributedDataParallel"):
        running = replace(running, engine=engine, weight_dtype="float32", gradient_accumulation_steps=4)
        verify(asked, running, SHAPES)


def test_another_schedule_is_told():
    asked = plan(name="gpipe", backend="torch", sharding="none", schedule="GPipe", dims=ParallelDims(pp=2))
    running = replace(RUNNING, zero_stage=0, sharded=False, dims=ParallelDims(pp=2))
    running = replace(running, gradient_accumulation_steps=4, num_parameters_per_rank=9)
    verify(asked, replace(running, engine="ScheduleGPipe"), SHAPES)
    with pytest.raises(TopologyError, match="engine: asked for 'ScheduleGPipe', but 'Schedule1F1B' runs"):
        verify(asked, replace(running, engine="Schedule1F1B"), SHAPES)


def test_a_mesh_in_another_order_is_told():
    """Tensor-parallel ranks that are no neighbours."""
    dims = ParallelDims(dp_shard=2, tp=2)
    asked = plan(**TORCH, world_size=4, dims=dims)
    running = replace(RUNNING, zero_stage=0, world_size=4, dims=dims, num_parameters_per_rank=3)
    verify(asked, running, SHAPES)
    with pytest.raises(TopologyError) as error:
        verify(asked, replace(running, order=("tp", "dp_shard")), SHAPES)
    asked_for = "{'dp_shard': 2, 'tp': 2}"
    assert str(error.value).endswith(f"\n  mesh: asked for {asked_for}, but {{'tp': 2, 'dp_shard': 2}} runs")


@pytest.mark.parametrize("count", [4, 6, 10])
def test_another_share_is_told(count):
    with pytest.raises(TopologyError) as error:
        verify(plan(), replace(RUNNING, num_parameters_per_rank=count), SHAPES)
    assert str(error.value).endswith(f"\n  num_parameters_per_rank: asked for 5 to 5, but {count} runs")


def fsdp_plan(**sizes: int) -> SimpleNamespace:
    return plan(**TORCH, dims=ParallelDims(**sizes))


@pytest.mark.parametrize(
    ("asked", "shapes", "fewest", "most"),
    [
        (plan(sharding="zero2"), [(30, 20), (40,)], 640, 640),
        (plan(dims=ParallelDims(dp_shard=3)), [(5, 4), (4,)], 7 + 2, 7 + 2),  # 20 in parts of 7, 4 in parts of 2
        (fsdp_plan(dp_shard=4), [(5, 4)], 0, 8),  # 2, 2, 1 and 0 rows
        (fsdp_plan(dp_replicate=2, dp_shard=2, cp=2), [(8, 10), (4,)], 21, 21),
        (fsdp_plan(dp_shard=2, tp=2), [(8, 10), (4,)], 21, 22),  # the vector may be a norm's
        (fsdp_plan(dp_shard=2, tp=2), [(6, 10)], 10, 20),  # 3 rows of a tensor-parallel rank: 2 and 1
        (fsdp_plan(dp_shard=4, tp=2, ep=2), [(8, 10), (4, 6, 5)], 10 + 15, 10 + 30),  # experts, whole on both
    ],
)
def test_the_share_by_hand(asked, shapes, fewest, most):
    assert expected_share(asked, shapes) == pytest.approx((fewest * 0.9, most * 1.1))


@pytest.mark.parametrize(
    ("dims", "adapter", "reason"),
    [
        (ParallelDims(pp=2), {}, "stages"),
        (ParallelDims(tp=2), {"name": "lora", "quantization": None}, "adapter"),
    ],
)
def test_a_share_that_is_not_known_has_a_reason(dims, adapter, reason):
    asked = plan(dims=dims)
    if adapter:
        asked.recipe = SimpleNamespace(adapter=SimpleNamespace(**adapter))
    assert reason in expected_share(asked, SHAPES)
