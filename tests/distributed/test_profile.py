"""A run of which steps are recorded trains the same, and the record says what its ranks exchanged.

These bytes are those that the planner predicts, exactly.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from harness import largest_relative_difference, long
from test_expert_parallel import COMMON, CONFIGS

from samecurve.metrics.profiling.dimensions import joined
from samecurve.metrics.profiling.trace import breakdown, read_trace
from samecurve.planner import inputs, ledger, memory, strategies
from samecurve.planner.cluster import built_in
from samecurve.planner.stages import stages
from samecurve.planner.strategies import read
from samecurve.strategy.parallel_dims import DIMENSIONS, LOSS

STEPS = "profile.steps=[3,5]"


def profiled(workspace, strategy, *overrides, world=2):
    ranks = f"profile.ranks={sorted({0, 1, world // 2})}"
    run = workspace.run(strategy, world, STEPS, ranks, *overrides)
    assert run.returncode == 0, run.output
    folder = run.directory / "profile"
    return run, folder, json.loads((folder / "summary.json").read_text())


def arranged(run):
    """The run's recipe and strategy as the planner sees them."""
    facts = run.facts
    wanted = inputs.read(facts["recipe_path"], [each for each in facts["overrides"] if "profile" not in each])
    template = read(facts["strategy_path"])
    strategy, problems = strategies.describe(wanted, template, {}, facts["world_size"])
    assert not problems
    return wanted, strategy


def planned(run):
    wanted, strategy = arranged(run)
    return strategies.job(wanted, strategy, built_in(f"h100x{run.facts['world_size']}"))


# dimensions of the mesh in which the ranks of a ledger's axis may differ; weights are sharded over dp x cp
AXES = {"all": DIMENSIONS, "dp": LOSS, "cp": ("cp",), "tp": ("tp",), "pp": ("pp",)}


def by_dimension(dims, exchanges):
    """Bytes of a ledger by (dimension of the profile, collective)."""
    total = Counter()
    for each in exchanges:
        # where experts and shards are spread over the same ranks, only tokens count as the experts'
        where = each.axis if each.axis == "ep" else joined(dims, AXES[each.axis])
        total[where, each.collective] += each.num_bytes
    return dict(total)


def check_ledger(run, folder, routed=False):
    """`routed`: which ranks get the tokens is the routers' choice."""
    job, dims, compared = planned(run), arranged(run)[1].dims, 0
    for index, stage in enumerate(stages(job, by_cost=False)):
        rank = index * dims.world_size // job.dims.pp  # the first of the stage
        (trace,) = folder.glob(f"step_*/rank{rank}.pt.trace.json.gz")
        found = breakdown(read_trace(trace))
        # the last step's stop flag may still be on its way when the profile ends
        assert all(each.untyped <= (each.name == "all_reduce") for each in found.collectives)
        tokens = sum(each["tokens"] for each in run.metrics if each["step"] in found.steps)
        expected = by_dimension(dims, ledger.ledger(job, stage, tokens / len(found.steps) / dims.size(*LOSS)))
        counted = {
            (dimension.name, name): each.num_bytes / len(found.steps)
            for dimension in found.dimensions
            for name, each in dimension.collectives.items()
        }
        if routed:
            # the larger of what a rank sends, which is what even routers send, and of what it gets; of four exchanges
            # one too few would be at most 3 / 4 of the upper bound
            even, sent = (bytes_of.pop(("ep", "all_to_all")) for bytes_of in (expected, counted))
            assert even <= sent < 1.3 * even, stage
        # Means over steps of different tokens; the stop flag's byte travels in the background, perhaps a step later.
        # Where several tensor-parallel groups read different rows, one of them may train a token more than the mean.
        groups = job.dims.dp if job.dims.tp > 1 else 1
        assert counted == pytest.approx(expected, abs=1 if groups == 1 else 200), stage
        compared += 1
    assert compared == job.dims.pp


def check_states(run, content):
    """The planner's lines are those that the engine holds, within 5 %, the reduction's buffers included."""
    job = planned(run)
    lines = {line.name: max(line.forward, line.backward) for line in memory.anatomy(job)[content["rank"]].lines}
    held = content["memory_bytes"]
    if not any(part.startswith("param:") for part in job.strategy.offload):
        assert lines["weights"] == pytest.approx(held["weights"], rel=0.05)
    if not job.strategy.offload:  # else they are in host memory
        assert lines["master weights"] + lines["optimizer"] == pytest.approx(held["optimizer"], rel=0.05)
        assert (lines["accumulators"] or lines["gradients"]) == pytest.approx(held["gradients"], rel=0.05)
    if job.zero == 3:  # DeepSpeed allocates its bucket before the profiled steps
        return
    assert job.sharding.bucket_bytes <= held["activations"]
    if job.sharding.bucket_bytes > held["weights"]:  # of a tiny model they are nearly all there is
        assert job.sharding.bucket_bytes == pytest.approx(held["activations"], rel=0.05)


def test_ddp(workspace, reference):
    run, folder, content = profiled(workspace, "ddp")
    check_ledger(run, folder)
    check_states(run, content)
    assert run.facts["engine"] == "DistributedDataParallel"
    assert largest_relative_difference(run.column("loss"), reference.column("loss")) < 1e-5
    traces = folder / "step_00000003"
    assert sorted(path.name for path in traces.iterdir()) == [f"rank{rank}.pt.trace.json.gz" for rank in (0, 1)]
    assert (content["steps"], content["rank"]) == ([3, 4, 5], 0)
    assert sum(content["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert content["shares"]["communication"] > 0 and content["shares"]["optimizer"] > 0
    # fp32 gradients once a step, and a few numbers that the ranks agree on
    (reduced,) = (each for each in content["collectives"] if each["name"] == "all_reduce")
    gradients = 4 * run.facts["num_trained_parameters"]
    assert 0 <= reduced["num_bytes"] / 3 - gradients < 200
    assert reduced["calls"] >= 3 and reduced["seconds"] > 0
    (dimension,) = content["dimensions"]  # its time ends with the last step, which the stop flag may outlast
    assert (dimension["name"], dimension["num_bytes"]) == ("dp", reduced["num_bytes"])
    assert 0 < dimension["exposed_seconds"] + dimension["hidden_seconds"] < content["seconds"]
    memory = content["memory_bytes"]
    assert memory["gradients"] == gradients
    assert gradients <= memory["weights"] < gradients + 1000  # and rotary's frequencies
    assert 2 * gradients <= memory["optimizer"] < 2 * gradients + 1000  # and a step counter per weight
    # DDP's buckets, in which gradients lie, are there before the step
    assert memory["activations"] == content["allocated_bytes"]["cpu"] > 0
    assert "profile of steps 3 to 5: " in run.output
    assert run.output.count("summary in") == 1


def test_zero3_exchanges_what_the_ledger_says(workspace):
    run, folder, content = profiled(workspace, "zero3")
    check_ledger(run, folder)
    check_states(run, content)


# bytes per weight that a rank holds whole, and per weight that two ranks share
BYTES = {"fsdp": (12, 0), "zero1": (4, 12), "zero2": (4, 12), "zero3": (4, 12), "pipeline": (4 + 12, 0)}


@pytest.mark.parametrize("strategy", long(*BYTES))
def test_every_engine(strategy, workspace):
    run, _, content = profiled(workspace, strategy)
    assert sum(content["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert min(content["shares"][kind] for kind in ("matmul", "communication", "optimizer")) > 0
    assert all(each["num_bytes"] > 0 and each["seconds"] > 0 for each in content["collectives"])
    # a weight and two moments, and the fp32 master that DeepSpeed keeps beside the weight, even where that is fp32
    memory, (per_rank, per_both) = content["memory_bytes"], BYTES[strategy]
    expected = run.facts["num_parameters_per_rank"] * per_rank + run.facts["num_trained_parameters"] / 2 * per_both
    assert memory["weights"] + memory["optimizer"] == pytest.approx(expected, rel=0.03)


KINDS = ("full", "selective")
# no save between the steps: with weights on NVMe it would be in the main thread, and in the trace
ACCUMULATED = (
    "data.packing=true",
    "batch.micro_batch_size=2",
    "evaluate.every_steps=0",
    "checkpoint.every_steps=0",
    "steps=6",
)
EXCHANGING = (
    "ddp",
    "fsdp",
    "zero1",
    "zero2",
    "zero2_offload",
    "zero3",
    "zero3_offload",
    "zero3_nvme",
    "pipeline",
    "pipeline_1f1b",
    "pipeline_interleaved",
    "pipeline_zbv",
    "tp",
)


@pytest.mark.parametrize("precision", long("fp32", "bf16"))
@pytest.mark.parametrize("strategy", (*EXCHANGING, "fsdp_ulysses", "fsdp_cp", "ring"))
def test_predicted_bytes_are_those_exchanged(strategy, precision, workspace):
    """With accumulation. fsdp_offload needs an accelerator."""
    path = workspace.ring if strategy == "ring" else strategy
    run, folder, content = profiled(workspace, path, *ACCUMULATED, f"precision={precision}")
    check_ledger(run, folder)
    check_states(run, content)


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "world", "precision"),
    [
        ("pipeline", 4, "fp32"),
        ("pipeline", 4, "bf16"),
        ("pipeline_gpipe", 2, "fp32"),
        ("pipeline_dualpipev", 2, "fp32"),
        ("hsdp", 4, "fp32"),
        ("zero3_hpz", 4, "fp32"),
        ("fsdp_tp", 4, "fp32"),
        ("fsdp_tp_cp", 8, "fp32"),
        ("pipeline_fsdp", 4, "fp32"),
        ("pp_fsdp_tp", 8, "fp32"),
    ],
)
def test_predicted_bytes_of_several_dimensions(strategy, world, precision, workspace):
    run, folder, _ = profiled(workspace, strategy, *ACCUMULATED, f"precision={precision}", world=world)
    check_ledger(run, folder)


@pytest.mark.full
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize(
    ("strategy", "world", "checkpointing"),
    [("fsdp_ep", 2, "none"), ("fsdp_ep", 2, "full"), ("fsdp_ep_tp", 4, "none"), ("fsdp_ep_tp", 4, "full")],
)
def test_experts_exchange_tokens(strategy, world, checkpointing, routed, workspace):
    """Exactly those of the formula where each token goes to all four experts, which no router can make uneven."""
    model = {**COMMON, **CONFIGS["mixtral"], "model_type": "mixtral"} | ({} if routed else {"num_experts_per_tok": 4})
    more = f"model.config={json.dumps(model)}", "model.router_loss=off"
    more += (f"memory.activation_checkpointing={checkpointing}",)
    run, folder, content = profiled(workspace, strategy, *ACCUMULATED, *more, world=world)
    check_states(run, content)
    check_ledger(run, folder, routed=routed)


PLAIN = "precision=fp32"


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "recompute"),
    [
        *(
            (name, kind)
            for name in ("fsdp", "zero3", "fsdp_ulysses", "fsdp_cp", "tp")
            for kind in ("full", "selective")
        ),
        ("ring", "full"),
    ],
)
def test_predicted_bytes_of_layers_that_are_recomputed(strategy, recompute, workspace):
    """Selective recomputation keeps results of products, but repeats what the ranks exchange of them.

    Under it, torch's profiler records exchanges of experts twice, and those of a ring without their sizes.
    """
    path = workspace.ring if strategy == "ring" else strategy
    run, folder, _ = profiled(workspace, path, *ACCUMULATED, f"memory.activation_checkpointing={recompute}")
    check_ledger(run, folder)


@pytest.mark.parametrize(
    "more",
    long(PLAIN, "precision=bf16", "memory.activation_checkpointing=full", "memory.activation_checkpointing=selective"),
)
def test_sequence_parallelism_sends_as_much_as_tensor_parallelism(more, workspace):
    """Within the layers. On the wire an all-reduce is a reduce-scatter and an all-gather."""
    run, folder, _ = profiled(workspace, workspace.sequence_parallel("tp"), *ACCUMULATED, more)
    check_ledger(run, folder)
    cut = planned(run)
    whole = replace(cut, strategy=replace(cut.strategy, tp_sequence_parallel=False))
    one_pass = ledger.FP32 * cut.grad_accum * cut.tokens * cut.shape.hidden
    # a layer that is recomputed gathers twice, of which the sum that is left out takes back one
    ends = (2 + cut.shape.layers * cut.repeats_layers) * one_pass
    assert wire(cut) - wire(whole) == ends + 2 * ledger.FP32 * (2 * cut.shape.layers + 1) * cut.shape.hidden


def wire(job) -> int:
    """Bytes of a step in units of an all-gather, apart from what all strategies exchange."""
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    (stage,) = stages(job, by_cost=False)
    return sum(passes[each.collective] * each.num_bytes for each in ledger.ledger(job, stage) if each.axis == "tp")
