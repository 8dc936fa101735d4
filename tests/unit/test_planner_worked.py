"""Worked numbers of courses, guides and papers that the planner has to reproduce (pipelines, FLOPs, states, costs)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planner_anatomy import strategy

from samecurve.planner import data_parallel_time, inputs, kernels, ledger, memory, search, step_time
from samecurve.planner.cluster import built_in
from samecurve.planner.hardware import gpu, profile
from samecurve.planner.job import Job, Sharding, StateBytes
from samecurve.planner.model_shape import ModelShape
from samecurve.planner.stages import stages
from samecurve.planner.strategies import read
from samecurve.specs.gpus import GIB
from samecurve.strategy.timetables import idle_slots

GPT_7B = ModelShape(32, 4096, 32, 32, 16384, 50304, gated=False, tied=True)
LLAMA_7B = ModelShape(32, 4096, 32, 32, 11008, 32000, gated=True, tied=False)


def gpt(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(layers, hidden, heads, heads, 4 * hidden, 51200, gated=False, tied=True)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_naive_pipeline(gpus):
    """One batch over k GPUs: 2(k-1) of 2k T_mini idle; k micro-batches: 2(k-1) of 2(2k-1) T_macro.

    A slot is forward and backward, 2 T. Micro-batches pay from T_mini / T_macro >= (2k-1)/k on.
    """
    naive, piped = (2 * (count + idle_slots("1f1b", gpus, count)) for count in (1, gpus))
    assert (naive, piped) == (2 * gpus, 2 * (2 * gpus - 1))
    assert piped / naive == pytest.approx((2 * gpus - 1) / gpus)


def test_a_forward_of_12_layers_has_24_all_reduces():
    """Two for each layer under tensor parallelism; the embedding's, in fp32, comes first."""
    job = Job(gpt(12, 1024, 16), strategy(1, tp=2), gpu("H100-80GB"), 2, 512, stack="tp")
    (found,) = ledger.ledgers(job).values()
    moved = next(each.num_bytes for each in found if each.content == "hidden states")
    hidden = 2 * 512 * 1024
    assert (moved - 4 * hidden) / (2 * hidden) == 24


@pytest.mark.parametrize(
    ("name", "micro_batch", "rows", "forwards"),
    [("ddp", 4, 32, 1), ("pp_fsdp_tp", 2, 8, 2), ("pp_fsdp_tp", 4, 32, 4), ("ddp", 1, 64, 8)],
)
def test_batches_of_8_gpus(name, micro_batch, rows, forwards):
    """8 replicas of 4 rows are 32; TP 2 and PP 2 leave 2 replicas: 32 rows are 4 micro-batches."""
    settings = [f"batch.global_batch_size={rows}", f"batch.micro_batch_size={micro_batch}"]
    wanted = inputs.read("benchmarks/planner/llama_8b.json", settings)
    (choice,) = search.evaluate(wanted, built_in("h100x8"), [read(f"configs/{name}.yaml")])
    job = choice.job
    assert job, choice.reason
    assert (job.grad_accum, job.micro_batch * job.grad_accum * job.dims.dp) == (forwards, rows)


def test_accumulation_divides_gradient_traffic():
    """A step of 8 micro-batches reduces as many bytes as one of a single one: 8 times fewer for each token."""
    job = Job(LLAMA_7B, strategy(8), gpu("H100-80GB"), 1, 4096, stack="ddp")
    stage, constants = stages(job, False)[0], profile("ddp")
    per_token = []
    for count in (1, 8):
        each = replace(job, grad_accum=count)
        (part,) = data_parallel_time.overlapped(each, stage, constants, kernels.layer(each, constants))
        moved = sum(exchange.num_bytes for exchange in ledger.ledger(each, stage) if exchange.content == "gradients")
        assert part.times(count) == 1 and moved > 0
        per_token.append((moved / count, part.times(count) * part.seconds / count))
    assert per_token[0] == pytest.approx([8 * value for value in per_token[1]])


@pytest.mark.parametrize(
    ("states", "total", "optimizer"),
    [
        (StateBytes(weights=2, gradients=4), 18, 8),  # mixed AdamW: 6 for the weights twice, 8 and 4
        (StateBytes(weights=2, gradients=4, optimizer=4), 14, 4),  # Adam in bf16, momentum, Lion
        (StateBytes(weights=2, gradients=4, optimizer=2), 12, 2),  # AdamW in 8 bits
        (StateBytes(weights=2, gradients=2, master=0, optimizer=4), 8, 4),  # all bf16 (AnyPrecision)
    ],
)
def test_bytes_per_parameter(states, total, optimizer):
    job = Job(GPT_7B, strategy(1), gpu("H200"), 1, 512, grad_accum=2, states=states)
    (each,) = memory.anatomy(job)
    lines = {line.name: line.optimizer for line in each.lines}
    held = sum(lines[name] for name in ("weights", "gradients", "accumulators", "master weights", "optimizer"))
    parameters = lines["weights"] / states.weights
    assert states.total == total == pytest.approx(held / parameters)
    assert lines["optimizer"] == pytest.approx(optimizer * parameters)


def test_context_and_communicators():
    """Contexts of four versions take 1.78, 0.90, 0.92 and 0.47 GB; the first barrier brings 0.55 GB to 2.00."""
    assert memory.CONTEXT_GIB * GIB / 1e9 == pytest.approx((0.90 + 0.92) / 2, rel=0.1)
    assert pytest.approx(2.00 - 0.55, rel=0.15) == memory.NCCL_GIB * GIB / 1e9


@pytest.mark.parametrize("shape", [LLAMA_7B, gpt(40, 5120, 40)])
def test_recomputation_costs_a_fifth_to_a_quarter_of_the_throughput(shape):
    job = Job(shape, strategy(8, zero=3, shard=8), gpu("A100-80GB"), 2, 2048, stack="fsdp2")
    plain, full = (step_time.breakdown(replace(job, checkpointing=kind)).total for kind in ("none", "full"))
    assert 0.20 <= 1 - plain / full <= 0.26


def test_deepspeed_reduces_whole_gradients():
    """Under ZeRO-1 and 2: one all-reduce has twice a reduce-scatter's volume; ZeRO-2 has one per micro-batch.

    On a slow network nothing is hidden, so that the seconds show the volume: 4 B of gradients, and 2 B of weights.
    """
    states = StateBytes(accumulators=4)
    job = Job(
        LLAMA_7B, strategy(64, zero=1, shard=64), gpu("H100-80GB"), 1, 512, 4, states, node_gbit=0.1, stack="deepspeed"
    )
    stage = stages(job, False)[0]
    zero2 = replace(job, strategy=strategy(64, zero=2, shard=64))
    textbook = replace(job, stack="textbook")
    constants = profile("deepspeed")
    one = kernels.layer(job, constants)
    (_, whole), (_, scattered) = (
        data_parallel_time.data_seconds(each, stage, constants, one) for each in (job, textbook)
    )
    assert whole / scattered == pytest.approx((2 * 4 + 2) / (4 + 2), rel=0.01)
    every, once = data_parallel_time.data_seconds(zero2, stage, constants, one)
    assert every / once == pytest.approx(2 * 4 / 2, rel=0.01)


def test_a_second_copy_in_each_node_saves_one_of_three_exchanges():
    """ZeRO-3 gathers twice and reduces once per micro-batch; on a slow network one within nodes costs nothing."""
    plain, second = (
        Job(
            LLAMA_7B, strategy(64, zero=3, shard=64, secondary=size), gpu("H100-80GB"), 1, 512, 1,
            node_gbit=0.1, stack="deepspeed", sharding=Sharding(reuse_distance=0, prefetched=0),
        )
        for size in (1, 8)
    )  # fmt: skip
    stage, constants = stages(plain, False)[0], profile("deepspeed")
    one = kernels.layer(plain, constants)
    (whole, _), (saved, _) = (data_parallel_time.data_seconds(each, stage, constants, one) for each in (plain, second))
    assert saved / whole == pytest.approx(2 / 3, rel=0.01)


def test_hooks_of_zero3_take_the_hosts_time_on_a_gpu_too():
    """Of a layer that is too short for the GPU, 2.24 ms forward (measured on a CPU) and half more backward."""
    short = Job(LLAMA_7B, strategy(8, zero=2, shard=8), gpu("H100-80GB"), 1, 64, 1, stack="deepspeed")
    two, three = (
        kernels.layer(replace(short, strategy=strategy(8, zero=stage, shard=8)), profile("deepspeed"))
        for stage in (2, 3)
    )
    assert three.forward - two.forward == pytest.approx(2.24e-3)
    assert three.backward - two.backward == pytest.approx(1.5 * 2.24e-3)
