"""What layers keep, and how long they take, with the kinds of recomputation."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from test_planner_anatomy import LLAMA, a_job, strategy

from samecurve.planner import answers, kernels, memory, stages, step_time
from samecurve.planner.activations import kept_bytes, layer_bytes
from samecurve.planner.hardware import Profile

TOKENS, HIDDEN, FFN = 4096, 2048, 8192


def selective(**keys):
    return a_job(**{"checkpointing": "selective", "stack": "fsdp2", **keys})


@pytest.mark.parametrize(("flow", "width", "of_input"), [("16-bit", 2, 2), ("autocast", 2, 4), ("fp32", 4, 4)])
@pytest.mark.parametrize("tp", [1, 4])
def test_results_of_all_products_stay_in_this_project(flow, width, of_input, tp):
    """Queries, keys, values, attention's output, gate and up are divided; the sums behind attention and MLP are not."""
    job = selective(flow=flow, precision="fp32" if flow == "fp32" else "bf16", strategy=strategy(8, tp=tp))
    products = width * ((4 * HIDDEN + 2 * FFN) / tp + 2 * HIDDEN)
    assert kept_bytes(job) == TOKENS * (of_input * HIDDEN + products)


def test_elsewhere_every_second_product_stays():
    """Queries, values, gate and down of seven, and attention's output. The other three are repeated."""
    job = selective()
    assert kept_bytes(job) == TOKENS * 2 * (HIDDEN + 3 * HIDDEN + FFN + HIDDEN)
    plain = replace(LLAMA, gated=False)  # queries, values and up of six
    assert kept_bytes(selective(shape=plain)) == TOKENS * 2 * (HIDDEN + 3 * HIDDEN + FFN)
    attention, mlp = kernels._products(job, Profile())
    assert kernels._repeated_products(job, attention, mlp) == pytest.approx(attention / 2 + mlp / 3)


@pytest.mark.parametrize("stack", ["megatron", "nemo", "nanotron"])
def test_some_stacks_repeat_attention_alone(stack):
    """arXiv:2205.05198, section 5."""
    job = selective(stack=stack)
    assert kept_bytes(job) == layer_bytes(job) and not job.keeps_products
    assert not selective(stack="fsdp2", flash=False).keeps_products


def test_products_of_experts_are_repeated():
    """They are grouped, and not among the operators whose results are kept."""
    mixture = replace(LLAMA, experts=8, top_k=2)
    job = selective(shape=mixture, flow="16-bit")
    assert kept_bytes(job) == TOKENS * 2 * (HIDDEN + 4 * HIDDEN + HIDDEN)
    attention, mlp = kernels._products(job, Profile())
    assert kernels._repeated_products(job, attention, mlp) == mlp


def test_a_layer_whose_residuals_are_fp32_has_an_input_of_four_bytes():
    for flow, width in (("16-bit", 2), ("copies", 2), ("autocast", 4), ("fp32", 4)):
        assert kept_bytes(a_job(flow=flow, checkpointing="full")) == width * TOKENS * HIDDEN


def test_a_layer_in_use_has_again_what_it_had_not_kept():
    job = selective(flow="16-bit", strategy=strategy(8, zero=3, shard=8))
    (only,) = memory.anatomy(job)
    working = next(line for line in only.lines if line.name == "recomputed layer").backward
    assert working == layer_bytes(job) - kept_bytes(job)


def test_recomputation_takes_time_and_saves_memory():
    """In every public run, whatever waits for hosts and networks it has."""
    with Path("benchmarks/planner/runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        kinds = [
            answers.job_of_row({**row, "activation_checkpointing": kind}) for kind in ("none", "selective", "full")
        ]
        seconds = [step_time.breakdown(each).total for each in kinds]
        assert seconds[0] <= seconds[1] * (1 + 1e-9) and seconds[1] <= seconds[2] * (1 + 1e-9), row["id"]
        kept = [kept_bytes(each) for each in kinds]
        assert kept[0] >= kept[1] >= kept[2], row["id"]


def test_gpipe_keeps_all_micro_batches():
    job = a_job(strategy=strategy(2, pp=4, schedule="gpipe"), grad_accum=16)
    for stage in stages.stages(job, False):
        assert stages.in_flight(job, stage)[0] == 16


def test_a_mask_costs_the_scores_that_the_causal_half_leaves_out():
    """And a slower kernel. Ulysses gives each rank a part of the heads, gathered keys those up to two chunks' ends."""
    job = a_job(flow="16-bit")
    causal, masked = (kernels.attention_seconds(replace(job, masked=each), Profile()).total for each in (False, True))
    assert masked == pytest.approx(2 / kernels.MASKED * causal)
    for exchange, share in (("ulysses", 1), ("allgather", (2 * 4 + 1) / (4 * 4))):
        cut = replace(job, strategy=strategy(2, cp=4, exchange=exchange), masked=True)
        assert kernels.attention_seconds(cut, Profile()).total == pytest.approx(masked / 4 * share)
