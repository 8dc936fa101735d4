"""Memory and time that the planner predicts: published cases, and what must hold for every job."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks.planner import fitting
from samecurve.planner import kernels, links, memory, model_shape, plan_text, step_time, tensor_lines
from samecurve.planner.activations import layer_bytes
from samecurve.planner.hardware import Profile, gpu
from samecurve.planner.job import Job, Sharding, StateBytes
from samecurve.planner.links import Level
from samecurve.planner.model_shape import ModelShape
from samecurve.planner.stages import shard_sizes, stage_parameters, stages
from samecurve.planner.tensor_lines import MOMENTS, Line
from samecurve.specs.gpus import GIB
from samecurve.specs.model_families import FAMILIES, families
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Strategy

GPT = ModelShape(32, 4096, 32, 32, 16384, 50257, gated=False, tied=False, positions=512)
LLAMA = ModelShape(16, 2048, 32, 32, 8192, 131072, gated=True, tied=True)
STATES = ("weights", "gradients", "accumulators", "master weights", "optimizer")


def strategy(
    dp=1, tp=1, pp=1, cp=1, *, ep=1, zero=0, shard=1, schedule="", secondary=1, sequence_parallel=False, exchange="",
    offload=(),
) -> Strategy:  # fmt: skip
    """Describe a strategy by its data-parallel ranks, of which `shard` (with those of cp) share what is sharded."""
    own = shard // cp if zero else 1
    dims = ParallelDims(pp, dp // own, own, cp, tp, ep)
    return Strategy(
        sharding=f"zero{zero}" if zero else "none", schedule=schedule, dims=dims, secondary_partition=secondary,
        tp_sequence_parallel=sequence_parallel, context_parallel=exchange, offload=offload,
    )  # fmt: skip


EIGHT = strategy(8)


def a_job(shape=LLAMA, strategy=EIGHT, **keys) -> Job:
    return Job(shape, strategy, gpu("H100-80GB"), **{"micro_batch": 1, "seq": 4096, "grad_accum": 4, **keys})


def states(job: Job) -> float:
    return max(sum(line.optimizer for line in each.lines if line.name in STATES) for each in memory.anatomy(job))


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_table_1(zero, gigabytes):
    """7.5e9 parameters on 64 GPUs (arXiv:1910.02054, figure 1 and table 1), 16 bytes each."""
    wide = ModelShape(1, 1, 1, 1, 0, 0, gated=True, tied=True)
    scale = 7.5e9 / stage_parameters(a_job(wide), stages(a_job(wide), False)[0])[0]
    job = a_job(wide, strategy(64, zero=zero, shard=64 if zero else 1))
    assert states(job) * scale / 1e9 == pytest.approx(gigabytes, rel=0.015)


@pytest.mark.parametrize(
    ("sizes", "steady", "peak"), [(StateBytes(), 25.74, 31.38), (StateBytes(master=2, optimizer=4), 16.17, 18.93)]
)
def test_deepspeed_6_86b(sizes, steady, peak):
    """ZeRO-3 on 4 H100s (DeepSpeedExamples, bf16_master_weight), in GiB."""
    keys = {"micro_batch": 1, "seq": 512, "grad_accum": 1, "flash": False, "checkpointing": "full"}
    job = a_job(GPT, strategy(4, zero=3, shard=4), states=sizes, stack="deepspeed", **keys)
    assert states(job) / GIB == pytest.approx(steady, rel=0.05)
    assert max(each.peak for each in memory.anatomy(job)) / GIB == pytest.approx(peak, rel=0.05)


def test_zero_3_keeps_a_bucket_and_the_weights_that_it_needs_soon():
    """DeepSpeed 0.19 allocates 5e8 elements before the first step; of a process's memory only used pages count."""
    layout, keys = (
        strategy(8, zero=3, shard=8),
        {"states": StateBytes(), "stack": "deepspeed", "sharding": Sharding(bucket_bytes=2e9)},
    )
    (large,) = memory.anatomy(a_job(strategy=layout, **keys))
    assert [named(large, moment)["reduce buckets"] for moment in MOMENTS] == [2e9, 2e9, 2e9]
    assert [named(large, moment)["reordered bucket"] for moment in MOMENTS] == [0, 2e9, 0]
    # those used again within 1e9 elements, half of which come before them, and 5e7 ahead; 2 bytes each
    assert named(large)["gathered weights"] == 2 * (1e9 / 2 + 5e7)
    shape = replace(LLAMA, layers=4, vocab=1000)
    (small,) = memory.anatomy(a_job(shape, layout, memory_kind="resident", **keys))
    assert named(small)["reduce buckets"] == named(small)["reordered bucket"] == 4 * shape.parameters
    assert named(small)["gathered weights"] == 2 * shape.parameters


@pytest.mark.parametrize(("distance", "stay"), [(0, 0), (1e9, 5e8)])
def test_a_second_copy_of_the_weights(distance, stay):
    """Under hpZ over 8 of 64 ranks, 2 bytes of a parameter divided by 8, of those that were released until then."""
    keys = {"states": StateBytes(), "stack": "deepspeed"}
    keys["sharding"] = Sharding(reuse_distance=distance)
    plain, second = (a_job(strategy=strategy(64, zero=3, shard=64, secondary=size), **keys) for size in (1, 8))
    (before,), (after,) = memory.anatomy(plain), memory.anatomy(second)
    copy = 2 * (LLAMA.parameters - stay) / 8
    for moment, expected in (("forward", copy), ("backward", copy), ("optimizer", 0)):
        assert after.totals[moment] - before.totals[moment] == pytest.approx(expected)


def test_activations_of_a_layer():
    """s b h (34 + 5 a s / h), divided as Table 2 of arXiv:2205.05198 says."""
    fused = a_job(GPT, strategy(1), seq=512)
    plain = replace(fused, flash=False, checkpointing="selective")  # without the scores, with dropout's masks
    tokens = 512 * 4096
    assert layer_bytes(fused) == 32 * tokens
    assert layer_bytes(plain) == 34 * tokens
    assert layer_bytes(replace(plain, checkpointing="none")) == tokens * 34 + 5 * 32 * 512 * 512
    assert layer_bytes(replace(plain, strategy=strategy(1, tp=8))) == tokens * (10 + 24 / 8)
    assert layer_bytes(replace(plain, strategy=strategy(1, tp=8, sequence_parallel=True))) == tokens * 34 / 8
    llama = a_job(LLAMA, strategy(1))
    assert layer_bytes(llama) == 4096 * (28 * 2048 + 8 * 8192)


# What torch's MemTracker counts for a layer of transformers' Llama of width 512 on 1,024 tokens, in bytes per token and
# unit of width: with as many keys as queries, with a quarter of them, and with an MLP of width 2,048 instead of 512. In
# fp32 with a mask.
TRACKED = {
    "16-bit": (32.02, 29.02, 56.02),
    "copies": (39.02, 34.52, 72.02),
    "autocast": (49.02, 44.52, 82.02),
    "fp32": (64.08, 64.08, 112.08),
}


@pytest.mark.parametrize("flow", TRACKED)
def test_activations_of_a_transformers_layer(flow):
    """With copies and autocast, the tracker also counts a 16-bit copy of the layer's weights."""
    plain = ModelShape(4, 512, 8, 8, 512, 320, gated=True, tied=True)
    for shape, tracked in zip(
        (plain, replace(plain, kv_heads=2), replace(plain, ffn=2048)), TRACKED[flow], strict=True
    ):
        job = a_job(shape, strategy(1), seq=1024, grad_accum=1, flow=flow, masked=flow == "fp32")
        job = replace(job, precision="fp32" if flow == "fp32" else "bf16")
        (each,) = memory.anatomy(job)
        lines = named(each, "forward")
        held = lines["activations"] / 4
        held += lines["16-bit weights"] * shape.layer_parameters / shape.parameters
        assert held / 1024 / 512 == pytest.approx(tracked, rel=0.01)


# GiB that torch's MemTracker counts for a layer of width 512 on 16 rows of 1,024 tokens, in 16 bits with a mask.
OF_FAMILIES = {
    "llama": 0.391,
    "qwen3": 0.462,
    "gemma": 0.422,
    "gemma2": 1.516,
    "gemma3_text": 0.642,
    "glm4": 0.503,
    "helium": 0.426,
    "olmo2": 0.520,
    "phi3": 0.407,
    "granite": 0.391,
    "mixtral": 0.625,
    "qwen3_moe": 0.698,
    "gpt_oss": 1.135,
}


@pytest.mark.parametrize("family", OF_FAMILIES)
def test_activations_of_a_familys_layer(family):
    """Norms of queries and keys, norms behind attention and MLP, norms in fp32, scores without a fused kernel."""
    fields = {"model_type": family, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    fields |= {"num_key_value_heads": 4, "num_hidden_layers": 8, "head_dim": 64, "vocab_size": 300}
    if family in families("expert_parallel"):
        fields |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    job = a_job(model_shape.shape(fields, family), strategy(1), micro_batch=16, seq=1024, flow="16-bit", masked=True)
    job = replace(job, flash=not FAMILIES[family].score_bytes)
    assert layer_bytes(job) / GIB == pytest.approx(OF_FAMILIES[family], rel=0.05)


@pytest.mark.parametrize(("family", "each"), [("gpt_oss", 2), ("gemma2", 8), ("llama", 6)])
def test_scores_without_a_fused_kernel(family, each):
    """Bytes of a score that a layer keeps in 16 bits, by MemTracker at two lengths; 6 more in the backward pass."""
    fields = {"model_type": family, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    shape = model_shape.shape({**fields, "num_hidden_layers": 8, "head_dim": 64, "vocab_size": 300}, family)
    short, long = (a_job(shape, strategy(1), seq=length, flow="16-bit", flash=False) for length in (512, 1024))
    fused = [layer_bytes(replace(job, flash=True)) for job in (short, long)]
    assert [layer_bytes(short) - fused[0], layer_bytes(long) - fused[1]] == [each * 8 * 512**2, each * 8 * 1024**2]
    assert named(memory.anatomy(long)[0], "backward")["gradients of scores"] == 6 * 8 * 1024**2
    assert named(memory.anatomy(replace(long, flash=True))[0], "backward")["gradients of scores"] == 0


def test_masks_are_whole_on_each_rank():
    """2 bytes for each query and key of 2 rows of 4,096 tokens; gathered keys need those up to a chunk's end.

    With 4 ranks, rank 0 has the first and the last of 8 chunks, whose 512 queries see 512 and 4,096 keys.
    """
    plain = a_job(seq=4096, micro_batch=2, flow="16-bit", masked=True)

    def of_mask(layout: Strategy) -> float:
        job = replace(plain, strategy=layout)
        # without other keys and values: one head is never repeated
        job = replace(job, shape=replace(LLAMA, kv_heads=1))
        return layer_bytes(job) - layer_bytes(replace(job, masked=False))

    for layout in (strategy(), strategy(tp=8, sequence_parallel=True), strategy(cp=4, exchange="ulysses")):
        assert of_mask(layout) == pytest.approx(2 * 2 * 4096**2)
    assert of_mask(strategy(cp=4, exchange="allgather")) == pytest.approx(2 * 2 * 512 * (512 + 4096))


def test_experts_on_different_ranks_hold_the_tokens_of_the_fullest_one():
    """Of each of two experts a token has 8 f + 4 h; across an all-to-all, which keeps nothing, a fifth more of them."""
    mixture = replace(LLAMA, experts=8, top_k=2)
    here, there = (layer_bytes(a_job(mixture, strategy(8, ep=ep))) for ep in (1, 8))
    dense = 4096 * 28 * 2048
    assert here == dense + 4096 * 2 * (8 * 8192 + 4 * 2048)
    assert there == pytest.approx(dense + 1.2 * 4096 * 2 * (8 * 8192 + 4 * 2048))


@pytest.mark.parametrize(("ranks", "full"), [(2, 2), (8, 4), (3, 2)])
def test_fsdp_cuts_between_stacked_experts(ranks, full):
    """4 experts are halves on 2 ranks and quarters on 8, as the dry run tracks them; on 3 ranks one has two."""
    mixture = replace(LLAMA, experts=4, top_k=2)
    job = a_job(mixture, strategy(ranks, zero=3, shard=ranks), stack="fsdp2", flow="fp32")
    assert shard_sizes(job) == (ranks, full)


def test_experts_that_take_turns_are_launched_one_by_one():
    """With few tokens, 64 experts of a rank cost 64 times the launches of one: 0.1 ms forward, 0.15 ms backward."""
    mixture = replace(LLAMA, experts=128, top_k=2, hidden=64, ffn=64, heads=1, kv_heads=1)
    job = a_job(mixture, strategy(2, ep=2), seq=8)
    packed, unpacked = (kernels.layer(replace(job, packed_experts=kind), Profile()) for kind in (True, False))
    assert unpacked.total - packed.total == pytest.approx(64 * (0.1e-3 + 0.15e-3))


def test_gathered_inputs_under_sequence_parallelism():
    """DTensor keeps 4 s b h of each layer, Megatron one buffer; others run ahead while four fifths are not full."""
    job = a_job(strategy=strategy(1, tp=8, sequence_parallel=True))
    unit = 4096 * 2048
    assert named(memory.anatomy(replace(job, stack="fsdp2"))[0], "forward")["gathered inputs"] == 4 * 16 * unit
    assert named(memory.anatomy(replace(job, stack="megatron"))[0], "forward")["gathered inputs"] == 2 * unit
    ahead = Profile(gathered_inputs=100)
    (free,), (full,) = (memory.anatomy(replace(job, micro_batch=rows), ahead) for rows in (1, 30))
    assert named(free, "forward")["gathered inputs"] == 100 * unit
    assert full.totals["forward"] == pytest.approx(tensor_lines.AHEAD_SHARE * job.memory_gib * GIB)
    assert named(full, "forward")["gathered inputs"] < 3000 * unit
    piped = replace(job, strategy=strategy(1, tp=8, pp=2, sequence_parallel=True, schedule="1f1b"))
    assert all(named(each, "forward")["gathered inputs"] == 0 for each in memory.anatomy(piped, ahead))


@pytest.mark.parametrize("layout", [strategy(8), strategy(8, zero=3, shard=8), strategy(2, pp=4, schedule="1f1b")])
def test_printed_lines_add_up_to_what_has_to_fit(layout):
    """Rounded to 0.01 GiB each, at each moment; the largest total is the one that is compared with the GPU."""
    for each in memory.anatomy(a_job(strategy=layout)):
        lines = plan_text.anatomy_table(each).splitlines()
        rows = [[float(cell) for cell in re.findall(r"(?<=  )\d+\.\d\d(?=  |$)", line)[:3]] for line in lines[1:]]
        *parts, totals = rows
        assert len(parts) > 8 and all(len(row) == 3 for row in rows) and all(total > 0 for total in totals)
        for column, total in zip(zip(*parts, strict=True), totals, strict=True):
            assert sum(column) == pytest.approx(total, abs=0.005 * len(rows))
        assert max(totals) == pytest.approx(memory.counted(each, "nvidia_smi") / GIB, abs=0.0051)


def test_larger_micro_batches_hold_more():
    peaks = [max(each.peak for each in memory.anatomy(a_job(micro_batch=rows))) for rows in (1, 2, 4, 8)]
    assert peaks == sorted(set(peaks))


def test_first_stage_keeps_as_many_micro_batches_as_there_are_stages():
    job = a_job(strategy=strategy(1, pp=4, schedule="1f1b"), grad_accum=8)
    kept = {each.stage.name: each for each in memory.anatomy(job)}
    lines = {name: {line.name: line for line in each.lines} for name, each in kept.items()}
    first, last = (lines[name]["activations"].forward for name in ("first", "last"))
    assert first == 4 * last
    assert "logits and loss" in lines["last"] and "logits and loss" not in lines["first"]


def test_more_bandwidth_is_never_slower():
    for layout in (strategy(64, zero=3, shard=64), strategy(64), strategy(8, tp=8, sequence_parallel=True)):
        times = [step_time.breakdown(a_job(strategy=layout, node_gbit=gbit)).total for gbit in (400, 1600, 3200)]
        assert times == sorted(times, reverse=True)


def test_full_recomputation_costs_a_forward_pass():
    """arXiv:2205.05198, table 4: a layer of 22B takes 27.2 ms instead of 19.6 with full recomputation, 39 % more."""
    shape = ModelShape(48, 6144, 64, 64, 24576, 51200, gated=False, tied=True, positions=2048)
    job = Job(shape, strategy(1, tp=8), gpu("A100-80GB"), 4, 2048, flash=False, stack="megatron")
    plain, full = (step_time.breakdown(replace(job, checkpointing=kind)) for kind in ("none", "full"))
    layers = [each.compute + each.tensor_parallel for each in (plain, full)]
    assert layers[1] / layers[0] == pytest.approx(1.39, abs=0.06)


def test_a_profile_has_at_most_a_dozen_constants():
    assert len(Profile.__dataclass_fields__) <= 12


@pytest.mark.parametrize("family", "llama gpt2 qwen3 gemma2 mixtral qwen3_moe falcon starcoder2 jais2 nanochat".split())
def test_parameters_are_those_of_transformers(family):
    """Also where the config leaves out what the family has by default: tied embeddings, the width of a head."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000}
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    defaults = ("tie_word_embeddings", "head_dim")
    fields = {name: value for name, value in config.to_dict().items() if name not in defaults}
    assert model_shape.shape(fields, family).parameters == pytest.approx(
        sum(map(torch.numel, model.parameters())), rel=5e-3
    )


def test_many_nodes_share_the_network_worse():
    """From 16 to 64 nodes a network's rate halves; measured rates of a cluster file stay what they are."""
    levels = links.levels_of(gpu("H100-80GB"), 8, 3200)
    rates = [links.link(levels, 8, 8 * nodes, 1, 1.0, 0).bus_gb_per_s for nodes in (2, 16, 64)]
    assert rates == pytest.approx([3200 / 8 * 0.73, 3200 / 8 * 0.73, 3200 / 8 * 0.73 / 2])
    measured = (levels[0], Level("network", 0, ((1, 100),)))
    assert links.link(measured, 8, 512, 1, 1.0, 0).bus_gb_per_s == 100


def test_the_second_flash_attention_is_twice_as_fast():
    """llm-foundry was measured with the first one (arXiv:2307.08691)."""
    constants = Profile()
    seconds = [
        kernels.attention_seconds(a_job(stack=stack), constants).total for stack in ("llm-foundry-fsdp", "fsdp2")
    ]
    assert seconds[0] == pytest.approx(2 * seconds[1])


def test_a_small_source_moves_the_constants_less_than_many():
    job = a_job(strategy=strategy(1))
    true = 1.1 * step_time.breakdown(job, Profile()).total
    few = [fitting.Measured(job, "one", true, None)]
    many = [fitting.Measured(job, f"source {index}", true, None) for index in range(30)]
    errors = [abs(fitting.time_error(few[0], fitting.fit(runs, Profile()))) for runs in (few, many)]
    assert errors[1] < 0.02 < errors[0]


def test_what_is_not_on_the_gpu_is_not_counted_there():
    """Offloaded gradients follow the optimizer to host memory; a single GPU has no NCCL."""
    sharded = a_job(strategy=strategy(8, zero=3, shard=8), stack="fsdp2")
    (kept,) = memory.anatomy(sharded)
    (moved,) = memory.anatomy(
        replace(sharded, strategy=strategy(8, zero=3, shard=8, offload=("optimizer:cpu", "param:cpu")))
    )
    assert named(kept)["gradients"] > named(moved)["gradients"] == 0
    nccl = {gpus: next(line for line in overheads(gpus) if line.name == "NCCL").optimizer for gpus in (1, 2)}
    assert nccl[1] == 0 < nccl[2]


def named(each: memory.Anatomy, moment: str = "backward") -> dict[str, float]:
    return {line.name: getattr(line, moment) for line in each.lines}


def overheads(gpus: int) -> list[Line]:
    return memory.overhead(memory.anatomy(a_job(strategy=strategy(gpus)))[0])
