"""Bytes per step by collective: worked by hand, and against the textbook's multiples of the parameters.

tests/distributed/test_profile.py compares them with real runs.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from samecurve.cli.commands import main
from samecurve.planner.hardware import gpu
from samecurve.planner.job import Job, Sharding
from samecurve.planner.layout import Layout
from samecurve.planner.ledger import by_collective, ledgers
from samecurve.planner.shape import ModelShape

LLAMA = ModelShape(4, 32, 4, 2, 64, 300, gated=True, tied=True)
PARAMETERS = 46752
FP32_SUMS = Sharding(reduce_bytes=4)
UNTIED = ModelShape(80, 8192, 64, 8, 28672, 128256, gated=True, tied=False)


def moved(stack, layout, shape=LLAMA, **keys) -> dict[str, int]:
    keys = {"micro_batch": 2, "seq": 32, "chunked_loss": True, "sharding": FP32_SUMS, **keys}
    job = Job(shape, layout, gpu("H100-80GB"), stack=stack, **keys)
    (found,) = ledgers(job).values()
    return by_collective(
        each for each in found if each.content not in ("stop flag", "loss sum", "norms", "loss, norms")
    )


@pytest.mark.parametrize(
    "shape", [LLAMA, UNTIED, ModelShape(2, 64, 4, 4, 256, 512, gated=False, tied=True, positions=8)]
)
def test_the_shapes_of_all_weights_are_all_parameters(shape):
    assert sum(map(math.prod, shape.weights)) == shape.parameters


@pytest.mark.parametrize("count", [1, 3])
def test_by_hand(count):
    assert moved("ddp", Layout(2), grad_accum=count) == {"all_reduce": 4 * PARAMETERS}
    # head, tied embedding and final norm are gathered once, the four layers twice
    root, layer = 300 * 32 + 32, 9280
    sharded = moved("fsdp2", Layout(2, zero=3, shard=2), grad_accum=count)
    gathered = 2 * (root + 8 * layer) * count
    assert sharded == {"all_gather": gathered, "reduce_scatter": 4 * (root + 4 * layer) * count}
    first = moved("deepspeed", Layout(2, zero=1, shard=2), grad_accum=count)
    assert first == {"all_reduce": 4 * PARAMETERS, "all_gather": 2 * PARAMETERS}


def test_large_models_follow_the_textbook():
    """DDP 2 P of gradients, here counted once as the input; FSDP gathers 2 P and reduces P, in each micro-batch."""
    p = UNTIED.parameters
    found = moved("fsdp2", Layout(64, zero=3, shard=64), UNTIED, grad_accum=2)
    assert found["all_gather"] == pytest.approx(2 * 2 * 2 * p, rel=0.02)
    assert found["reduce_scatter"] == pytest.approx(2 * 4 * p, rel=0.02)
    third = moved("deepspeed", Layout(64, zero=3, shard=64), UNTIED, grad_accum=2)
    assert third["all_gather"] == pytest.approx(2 * 2 * 2 * p, rel=0.02)  # too many to stay whole until the backward


def test_experts_by_hand():
    """2 of 4 ranks share 4 experts: half of them is gathered, by the two ranks that hold them; tokens travel."""
    mixture = ModelShape(2, 32, 4, 2, 64, 300, gated=True, tied=True, experts=4, top_k=2)
    root, dense, experts = 300 * 32 + 32, 3072 + 2 * 32 + 4 * 32, 4 * 3 * 32 * 64
    found = moved("fsdp2", Layout(4, zero=3, shard=4, ep=2), mixture)
    assert found["all_gather"] == 2 * (root + 2 * 2 * (dense + experts // 2))
    assert found["reduce_scatter"] == 4 * (root + 2 * (dense + experts // 2))
    # 64 tokens to 2 experts and back, forward and backward, in bf16; their counts as int64
    assert found["all_to_all"] == 2 * (4 * 64 * 2 * 32 * 2 + 4 * 8)
    whole = moved("fsdp2", Layout(2, zero=3, shard=2, ep=2), mixture)
    assert whole["reduce_scatter"] == 4 * (root + 2 * dense)


def test_replicas_exchange_shards_and_rows_are_padded():
    flat, replicated = (moved("fsdp2", Layout(8, zero=3, shard=shard)) for shard in (8, 4))
    assert replicated["all_reduce"] * 4 == replicated["reduce_scatter"] < flat["reduce_scatter"]  # 300 rows, 8 ranks
    assert (
        moved("fsdp2", Layout(8, zero=3, shard=8), grad_accum=4, sharding=replace(FP32_SUMS, reduces_once=True))[
            "reduce_scatter"
        ]
        == flat["reduce_scatter"]
    )


def test_the_command_prints_and_writes_it(tmp_path, capsys):
    config = {
        **{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16},
        **{"num_key_value_heads": 16, "intermediate_size": 4096, "vocab_size": 32000, "tie_word_embeddings": True},
    }
    path, out = tmp_path / "config.json", tmp_path / "out.json"
    path.write_text(json.dumps(config))
    command = [
        "plan",
        str(path),
        "--cluster",
        "h100x8",
        "--strategy",
        "configs/ddp.yaml",
        "--ledger",
        "--json",
        str(out),
    ]
    assert main(command) == 0
    assert "only stage, per rank and step" in (printed := capsys.readouterr().out)
    (plan,) = json.loads(out.read_text())["plans"]
    (gradients,) = (each for each in plan["ledger"]["only"] if each["content"] == "gradients")
    assert (gradients["axis"], gradients["collective"]) == ("dp", "all_reduce")
    parameters = 8 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 32000 * 1024 + 1024
    assert gradients["num_bytes"] == 4 * parameters
    assert f"{4 * parameters / 2**20:,.3f}" in printed
