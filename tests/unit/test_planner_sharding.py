"""What a strategy's files say about weights and gradients on their way, in the planner's memory, time and ledger."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from test_planner_anatomy import LLAMA, a_job, named, strategy

from samecurve.bench.step import write_changed
from samecurve.config.documents import format_problems
from samecurve.planner import inputs, ledger, memory, strategies
from samecurve.planner.cluster import built_in
from samecurve.planner.data_parallel_time import data_seconds
from samecurve.planner.hardware import Profile
from samecurve.planner.job import Job, Sharding
from samecurve.planner.kernels import Seconds
from samecurve.planner.stages import divide, stage_parameters, stages
from samecurve.planner.step_time import breakdown
from samecurve.planner.strategies import read

SLOW = Seconds(0, 0)  # computation behind which nothing hides


def planned(tmp_path, name: str, *keys: str, precision: str = "bf16", gpus: int = 8, **config) -> Job:
    shape = {
        **{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "intermediate_size": 4096, "vocab_size": 32000, "tie_word_embeddings": True},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape | config))
    wanted = inputs.read(str(path), [f"precision={precision}"])
    (tmp_path / "strategy").mkdir()
    template = read(str(write_changed(f"configs/{name}.yaml", keys, tmp_path / "strategy")))
    strategy, problems = strategies.describe(wanted, template, {}, gpus)
    assert not problems, format_problems(problems)
    return strategies.job(wanted, strategy, built_in(f"h100x{gpus}"))


def moved(job: Job, constants: Profile | None = None) -> tuple[float, float]:
    """Seconds of data-parallel communication per micro-batch and per step, none of it hidden."""
    return data_seconds(job, stages(job, False)[0], constants or Profile(overlap=0), SLOW)


def counted(job: Job) -> dict[str, float]:
    (found,) = ledger.ledgers(job).values()
    return {f"{each.collective} of {each.content}": each.num_bytes for each in found}


@pytest.mark.parametrize(
    ("family", "tp", "said"),
    [
        ("qwen2", 8, ["28 attention heads", "4 key-value heads"]),
        ("qwen2", 4, []),
        ("phi3", 4, ["sequence parallelism, but the layers of a phi3 gather whole activations"]),
    ],
)
def test_sizes_that_a_run_would_refuse_are_not_planned(family, tp, said, tmp_path):
    """Qwen2.5-7B has 28 heads and 4 of keys and values."""
    shape = {"model_type": family, "hidden_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 28}
    shape |= {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    sizes = {"tp": tp, "tp_sequence": True}
    _, problems = strategies.describe(inputs.read(str(path), []), read("configs/fsdp_tp.yaml"), sizes, 8)
    found = [problem.text for problem in problems]
    assert len(found) == len(said) and all(text in line for line, text in zip(found, said, strict=True)), found


def test_replicas_of_shards_are_summed(tmp_path):
    """HSDP on 8 ranks of two nodes: a quarter of the gradients goes over the network, twice as in an all-reduce."""
    across = a_job(strategy=strategy(8, zero=3, shard=4), stack="fsdp2", gpus_per_node=4, node_gbit=1)
    within = replace(across, strategy=strategy(4, zero=3, shard=4))
    constants = Profile(overlap=0, network_share=1, ring_step_us=0)
    shard = 2 * sum(stage_parameters(across, stages(across, False)[0])) / 4
    # a rank has a fourth of a node's 1 Gbit/s, 0.73 of which is attained
    expected = 2 * (2 - 1) / 2 * shard / (0.73 * 1e9 / 8 / 4)
    assert moved(across, constants)[0] - moved(within, constants)[0] == pytest.approx(expected, rel=0.01)


def test_weights_that_are_kept_elsewhere_are_gathered_all_the_same():
    sharded = a_job(strategy=strategy(8, zero=3, shard=8), stack="fsdp2")
    states = replace(sharded.states, weights=0)
    kept, moved_out = (memory.anatomy(each)[0] for each in (sharded, replace(sharded, states=states)))
    assert named(kept)["gathered weights"] == named(moved_out)["gathered weights"] > 0


def test_gradients_that_wait_for_the_last_micro_batch_are_whole_and_travel_once():
    every = a_job(strategy=strategy(8, zero=3, shard=8), stack="fsdp2")
    once = replace(every, sharding=Sharding(reduces_once=True))
    held = [named(memory.anatomy(each)[0])["gradients"] for each in (every, once)]
    assert held[1] == pytest.approx(8 * held[0])
    assert named(memory.anatomy(replace(once, grad_accum=1))[0])["gradients"] == pytest.approx(held[0])
    (each_time, _), (gathered, reduced) = moved(every), moved(once)
    assert gathered == pytest.approx(2 / 3 * each_time) and reduced == pytest.approx(1 / 3 * each_time)


def test_layers_that_stay_gathered(tmp_path):
    plain, kept = (a_job(strategy=strategy(8, zero=3, shard=8), stack="fsdp2", sharding=Sharding(reshards=each))
                   for each in (True, False))  # fmt: skip
    assert named(memory.anatomy(kept)[0])["gathered weights"] == pytest.approx(2 * LLAMA.parameters)
    assert moved(kept)[0] == pytest.approx(2 / 3 * moved(plain)[0])
    read = planned(tmp_path, "fsdp", "fsdp_config.fsdp_reshard_after_forward=false")
    assert read.sharding == Sharding(reduce_bytes=4, reshards=False)


def test_fsdp_reduces_in_the_files_dtype(tmp_path):
    wide = planned(tmp_path, "fsdp")
    narrow = replace(wide, sharding=replace(wide.sharding, reduce_bytes=2))
    name = "reduce_scatter of gradients"
    assert counted(wide)[name] == 2 * counted(narrow)[name]
    # weights of 2 bytes are gathered twice; gradients of 4 or 2 bytes are reduced once
    assert 1 < moved(wide)[0] / moved(narrow)[0] < 8 / 6  # a larger payload is faster


def test_fsdps_reduce_dtype_is_read(tmp_path):
    assert planned(tmp_path, "fsdp", "fsdp_config.fsdp_reduce_dtype=bf16").sharding.reduce_bytes == 2


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("zero3", (), {"overlaps": True, "persistent": 10 * 1024, "prefetched": 5e7, "bucket_bytes": 4 * 5e8}),
        ("zero3", ("overlap_comm=false", "stage3_max_reuse_distance=7"), {"overlaps": False, "reuse_distance": 7}),
        ("zero3", ("stage3_prefetch_bucket_size=auto",), {"prefetched": int(0.9 * 1024**2)}),
        ("zero3", ("stage3_max_live_parameters=1000",), {"prefetched": 1000}),
        ("zero3", ("stage3_param_persistence_threshold=512",), {"persistent": 512}),
        ("zero3", ("reduce_bucket_size=auto",), {"bucket_bytes": 4 * 1024**2}),
        ("zero2", (), {"overlaps": False, "bucket_bytes": 2 * 1e8}),
        ("zero2", ("overlap_comm=true",), {"overlaps": True, "bucket_bytes": 2 * 2 * 1e8}),
        ("zero1", (), {"overlaps": False, "bucket_bytes": 0}),  # BF16_Optimizer
        ("pipeline", (), {"overlaps": False}),
    ],
)
def test_deepspeeds_keys(name, keys, expected, tmp_path):
    found = planned(tmp_path, name, *(f"zero_optimization.{each}" for each in keys)).sharding
    assert {key: getattr(found, key) for key in expected} == expected


def test_zero3_gathers_again_what_it_did_not_keep(tmp_path):
    """Weights used again after fewer than 1e9 elements stay: the last 5e8 of a model, as each comes once each way."""
    wide = {"hidden_size": 4096, "num_hidden_layers": 16, "intermediate_size": 16384, "tie_word_embeddings": False}
    large = planned(tmp_path, "zero3", **wide)
    assert large.live_elements == 5e8
    name = "all_gather of weights"
    never, always = (
        counted(replace(large, sharding=replace(large.sharding, reuse_distance=each)))[name] for each in (0, 1e12)
    )
    assert never == pytest.approx(2 * always, rel=0.01)
    layer = 4 * 4096**2 + 3 * 4096 * 16384
    assert (never - counted(large)[name]) / large.grad_accum == pytest.approx(2 * 5e8, abs=2 * layer)
    assert replace(large, checkpointing="full").live_elements == pytest.approx(1e9 / 3)


def test_sharded_stages_are_gathered_once_in_fp32(tmp_path):
    """An fp32 shard beside whole weights and gradients, until the step's last backward pass."""
    job = planned(tmp_path, "pipeline_fsdp", gpus=4)
    first = memory.anatomy(job)[0]
    parameters = sum(stage_parameters(job, first.stage))
    held = named(first)
    assert held["weights"] == 4 * parameters / 2
    assert held["gathered weights"] == held["gradients"] == 4 * parameters
    found = {f"{each.collective} of {each.content}": each.num_bytes for each in ledger.ledgers(job)["first"]}
    assert found["all_gather of weights"] == found["reduce_scatter of gradients"] == 4 * parameters
    assert moved(job)[0] == 0 < moved(job)[1]


def test_layers_are_divided_as_deepspeed_does():
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    draw = random.Random(0)
    for _ in range(60):
        shape = replace(LLAMA, layers=draw.randint(2, 24), vocab=draw.choice([1000, 100_000, 400_000]))
        shape = replace(shape, tied=draw.random() < 0.5, positions=draw.choice([0, 2048]))
        sizes = [math.prod(shape.embedding_weights[0]), *(math.prod(each) for each in shape.embedding_weights[1:])]
        first, parts = len(sizes), draw.randint(2, 6)
        sizes += [round(shape.layer_parameters)] * shape.layers + [shape.hidden, shape.head_parameters]
        decoders = [int(first <= index < first + shape.layers) for index in range(len(sizes))]
        for partition, ends in (
            ("parameters", partition_balanced(sizes, parts)),
            ("uniform", partition_uniform(len(sizes), parts)),
            ("type:decoder", partition_balanced(decoders, parts)),
        ):
            expected = [sum(decoders[start:end]) for start, end in zip(ends, ends[1:], strict=False)]
            assert divide(shape, parts, partition) == expected, (shape, parts, partition)


def test_a_large_vocabulary_takes_layers_from_the_first_and_the_last_stage(tmp_path):
    job = planned(tmp_path, "pipeline", "pipeline.stages=4", vocab_size=128_000, num_hidden_layers=24)
    held = [each.layers for each in stages(job, False)]
    assert held == [2, 10, 2] and divide(job.shape, 4, "parameters") == [2, 10, 10, 2]


def test_the_slowest_stage_waits_for_the_others_at_their_pace(tmp_path):
    """Two stages, of which the last has the head: it is idle for the first one's forward and backward."""
    job = planned(tmp_path, "pipeline_gpipe", gpus=2, vocab_size=300_000)
    assert breakdown(job).bubble < breakdown(job).compute / job.grad_accum
    equal = replace(job, shape=replace(job.shape, vocab=1, layers=4000))  # a head that costs nothing
    time = breakdown(equal)
    assert time.bubble == pytest.approx((time.compute + time.pipeline_sends) / equal.grad_accum, rel=0.01)
