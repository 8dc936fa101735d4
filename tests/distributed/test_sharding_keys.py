"""Keys of the strategy's files that decide how shards are gathered and reduced: each reaches the engine, and the curve
stays that of a single process."""

from __future__ import annotations

import pytest
from harness import SAVE_EVERY, largest_relative_difference, long, relative_l2
from sharding_probe import STEPS
from test_profile import ACCUMULATED, check_ledger, profiled

from samecurve.bench.step import write_changed

EXACT = 1e-5, 1e-4  # loss and gradient norm, as of every strategy that sums in fp32
BF16 = 1e-3, 1e-2  # a gradient's sum is off by up to 2 ** -9; a loss or a norm averages that over many
MICRO_BATCHES, LAYERS, UNITS = 2, 4, 5  # a unit for each layer, and one for embedding, last norm and tied head
NUMBERS = {
    "reduce_bucket_size": 5000,
    "stage3_prefetch_bucket_size": 3000,
    "stage3_max_live_parameters": 20000,
    "stage3_max_reuse_distance": 100,
    "stage3_param_persistence_threshold": 512,
}
AHEAD = "fsdp_config.fsdp_reshard_after_forward=false", "fsdp_config.fsdp_forward_prefetch=true"
SMALL = tuple(f"zero_optimization.{key}={value}" for key, value in NUMBERS.items())


def probe(workspace, strategy: str, *keys: str) -> dict:
    folder = workspace.folder / f"keys_{len(list(workspace.folder.iterdir()))}"
    path = write_changed(workspace.strategy(strategy), keys, folder)
    return workspace.probe("sharding_probe.py", path, 2, f"batch.micro_batch_size={8 // 2 // MICRO_BATCHES}")


def assert_follows(found: dict, reference, tolerances: tuple[float, float]) -> None:
    for key, tolerance in zip(("loss", "grad_norm"), tolerances, strict=True):
        assert found[key] == pytest.approx(reference.column(key)[:STEPS], rel=tolerance, abs=0)


def test_ddp_holds_each_gradient_once(workspace, reference):
    """All of them lie in the bucket that is reduced, also while they are summed before that."""
    found = probe(workspace, "ddp")
    assert found["described"]["engine"] == "DistributedDataParallel"
    assert found["live"] == {"gradient_storages": [1] * MICRO_BATCHES}
    assert_follows(found, reference, EXACT)


def test_fsdp_keeps_weights_for_the_backward_pass_and_gathers_ahead(workspace, reference):
    """Gathered once and not twice: layers, and what is kept by default, of each micro-batch."""
    found = probe(workspace, "fsdp", *AHEAD)
    assert found["collectives"]["_allgather_base_ float32"] == MICRO_BATCHES * UNITS
    assert found["collectives"]["_reduce_scatter_base_ float32"] == MICRO_BATCHES * UNITS
    following = {f"model.layers.{index}": [f"model.layers.{index + 1}"] for index in range(LAYERS - 1)}
    assert found["live"]["prefetched"] == following
    assert_follows(found, reference, EXACT)


def test_fsdp_sums_gradients_in_bf16(workspace, reference):
    found = probe(workspace, "fsdp", "fsdp_config.fsdp_reduce_dtype=bf16")
    reduced = {name: count for name, count in found["collectives"].items() if "reduce_scatter" in name}
    assert reduced == {"_reduce_scatter_base_ bfloat16": MICRO_BATCHES * UNITS}
    assert found["described"]["reduce_dtype"] == "bfloat16"
    # the default: twice for each layer, and nothing ahead of its turn
    assert found["collectives"]["_allgather_base_ float32"] == MICRO_BATCHES * (2 * LAYERS + 1)
    assert found["live"]["prefetched"] == {}
    assert_follows(found, reference, BF16)


def test_zero3s_numbers(workspace, reference):
    found = probe(workspace, "zero3", *SMALL)
    persistent = found["live"].pop("persistent")
    assert found["live"] == NUMBERS
    # keys and values are 16 x 32, twice in every layer; the norms are there by default
    assert persistent.count([16, 32]) == 2 * LAYERS and persistent.count([32]) == 2 * LAYERS + 1
    assert len(persistent) == 4 * LAYERS + 1
    assert found["collectives"]["_reduce_scatter_base_ float32"] > 2 * MICRO_BATCHES  # one bucket would hold everything
    assert_follows(found, reference, EXACT)


@pytest.mark.parametrize(("strategy", "operation"), long(("zero3", "_reduce_scatter_base_"), ("zero2", "allreduce_")))
def test_deepspeed_sums_gradients_in_bf16(strategy, operation, workspace, reference):
    keys = "communication_data_type=bf16", "zero_optimization.reduce_bucket_size=5000"
    found = probe(workspace, strategy, *keys)
    assert found["collectives"][f"{operation} bfloat16"] > 2 * MICRO_BATCHES
    assert found["described"]["reduce_dtype"] == "bfloat16"
    assert_follows(found, reference, BF16)


@pytest.mark.parametrize("least", [1000, *long(5000)])
def test_fsdp_wraps_modules_by_size(least, workspace, reference):
    """All that is larger, but neither a list of layers nor what has the embedding or the last norm inside."""
    policy = "fsdp_config.fsdp_auto_wrap_policy=SIZE_BASED_WRAP"
    found = probe(workspace, "fsdp", policy, f"fsdp_config.fsdp_min_num_params={least}")
    units = {"", "model.embed_tokens", "model.norm", "lm_head"}
    parts = ["", ".mlp", ".self_attn"] if least == 1000 else ["", ".mlp"]
    units |= {f"model.layers.{index}{part}" for index in range(LAYERS) for part in parts}
    assert {*found["live"]["units"]} == units
    assert_follows(found, reference, EXACT)


DIVISORS = {
    "zero2": ("prescale_gradients=true", "zero_optimization.reduce_scatter=false"),
    "zero1": ("gradient_predivide_factor=3",),
    "zero3": ("prescale_gradients=true", "zero_optimization.reduce_scatter=false"),
}


@pytest.mark.parametrize("strategy", long(*DIVISORS))
def test_gradients_divided_before_the_sum(strategy, workspace, reference):
    assert_follows(probe(workspace, strategy, *DIVISORS[strategy]), reference, EXACT)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "keys"), [("fsdp", AHEAD), ("zero3", SMALL)], ids=["fsdp", "zero3"])
def test_a_whole_run_with_evaluation_and_export(strategy, keys, workspace, reference):
    """What an evaluation leaves gathered is not what the next step or the export reads."""
    folder = workspace.folder / f"run_of_keys_{strategy}"
    run = workspace.run(write_changed(workspace.strategy(strategy), keys, folder), 2, "batch.micro_batch_size=2")
    assert run.returncode == 0, run.output
    assert largest_relative_difference(run.column("loss"), reference.column("loss")) < EXACT[0]
    assert largest_relative_difference(run.column("grad_norm"), reference.column("grad_norm")) < EXACT[1]
    found, expected = ([each["eval_loss"] for each in r.metrics if "eval_loss" in each] for r in (run, reference))
    assert len(found) == 3 and found == pytest.approx(expected, rel=EXACT[0], abs=0)
    assert relative_l2(run.weights, reference.weights) < 1e-4


@pytest.mark.parametrize("strategy", long("zero1", "zero2", "zero2_offload", "pipeline"))
def test_weights_dealt_out_in_turn(strategy, workspace, reference):
    """round_robin_gradients: masters lie in another order than weights; training, checkpoints and export follow it."""
    key, folder = "zero_optimization.round_robin_gradients=true", workspace.folder / f"in_turn_{strategy}"
    path, rows = write_changed(workspace.strategy(strategy), (key,), folder), "batch.micro_batch_size=2"
    run = workspace.run(path, 2, rows)
    assert run.returncode == 0, run.output
    assert run.facts["deepspeed"]["zero_optimization"]["round_robin_gradients"] is True
    elsewhere = workspace.resume(run, SAVE_EVERY, None, 1, rows)
    back = workspace.resume(reference, SAVE_EVERY, path, 2, rows)
    for found in (run, elsewhere, back):
        assert found.returncode == 0, found.output
        assert largest_relative_difference(found.column("loss"), reference.column("loss")) < EXACT[0]
        assert largest_relative_difference(found.column("grad_norm"), reference.column("grad_norm")) < EXACT[1]
        assert relative_l2(found.weights, reference.weights) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("distance", [0, 20_000, 40_000])
def test_zero3_gathers_again_what_it_does_not_keep(distance, workspace):
    """Weights between whose uses lie more elements than that; the planner predicts the bytes of all gathers."""
    keys = "stage3_prefetch_bucket_size=0", f"stage3_max_reuse_distance={distance}"
    folder = workspace.folder / f"reuse_{distance}"
    changed = (f"zero_optimization.{key}" for key in keys)
    run, profile, _ = profiled(
        workspace, write_changed(workspace.strategy("zero3"), tuple(changed), folder), *ACCUMULATED
    )
    check_ledger(run, profile)
