"""Bytes per step by collective: worked by hand, and against the textbook's multiples of the parameters.

tests/distributed/test_profile.py compares them with real runs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from test_planner_anatomy import strategy

from samecurve.cli.commands import main
from samecurve.planner.hardware import gpu
from samecurve.planner.job import Job, Sharding
from samecurve.planner.ledger import ledgers
from samecurve.planner.model_shape import ModelShape

LLAMA = ModelShape(4, 32, 4, 2, 64, 300, gated=True, tied=True)
PARAMETERS = 46752
FP32_SUMS = Sharding(reduce_bytes=4)
UNTIED = ModelShape(80, 8192, 64, 8, 28672, 128256, gated=True, tied=False)


def moved(stack, layout, shape=LLAMA, **keys) -> dict[str, int]:
    keys = {"micro_batch": 2, "seq": 32, "chunked_loss": True, "sharding": FP32_SUMS, **keys}
    job = Job(shape, layout, gpu("H100-80GB"), stack=stack, **keys)
    (found,) = ledgers(job).values()
    sums: Counter[str] = Counter()
    for exchange in found:
        if exchange.content not in ("stop flag", "loss sum", "norms"):
            sums[exchange.collective] += exchange.num_bytes
    return dict(sums)


@pytest.mark.parametrize(
    "shape", [LLAMA, UNTIED, ModelShape(2, 64, 4, 4, 256, 512, gated=False, tied=True, positions=8)]
)
def test_the_shapes_of_all_weights_are_all_parameters(shape):
    assert sum(map(math.prod, shape.weights)) == shape.parameters


@pytest.mark.parametrize("count", [1, 3])
def test_by_hand(count):
    assert moved("ddp", strategy(2), grad_accum=count) == {"all_reduce": 4 * PARAMETERS}
    # head, tied embedding and final norm are gathered once, the four layers twice
    root, layer = 300 * 32 + 32, 9280
    sharded = moved("fsdp2", strategy(2, zero=3, shard=2), grad_accum=count)
    gathered = 2 * (root + 8 * layer) * count
    assert sharded == {"all_gather": gathered, "reduce_scatter": 4 * (root + 4 * layer) * count}
    first = moved("deepspeed", strategy(2, zero=1, shard=2), grad_accum=count)
    assert first == {"all_reduce": 4 * PARAMETERS, "all_gather": 2 * PARAMETERS}


def test_large_models_follow_the_textbook():
    """DDP 2 P of gradients, here counted once as the input; FSDP gathers 2 P and reduces P, in each micro-batch."""
    p = UNTIED.parameters
    found = moved("fsdp2", strategy(64, zero=3, shard=64), UNTIED, grad_accum=2)
    assert found["all_gather"] == pytest.approx(2 * 2 * 2 * p, rel=0.02)
    assert found["reduce_scatter"] == pytest.approx(2 * 4 * p, rel=0.02)
    third = moved("deepspeed", strategy(64, zero=3, shard=64), UNTIED, grad_accum=2)
    assert third["all_gather"] == pytest.approx(2 * 2 * 2 * p, rel=0.02)  # too many to stay whole until the backward


def test_experts_by_hand():
    """2 of 4 ranks share 4 experts: half of them is gathered, by the two ranks that hold them; tokens travel."""
    mixture = ModelShape(2, 32, 4, 2, 64, 300, gated=True, tied=True, experts=4, top_k=2)
    root, dense, experts = 300 * 32 + 32, 3072 + 2 * 32 + 4 * 32, 4 * 3 * 32 * 64
    found = moved("fsdp2", strategy(4, zero=3, shard=4, ep=2), mixture)
    assert found["all_gather"] == 2 * (root + 2 * 2 * (dense + experts // 2))
    assert found["reduce_scatter"] == 4 * (root + 2 * (dense + experts // 2))
    # 64 tokens to 2 experts and back, forward and backward, in bf16; their counts as int64
    assert found["all_to_all"] == 2 * (4 * 64 * 2 * 32 * 2 + 4 * 8)
    whole = moved("fsdp2", strategy(2, zero=3, shard=2, ep=2), mixture)
    assert whole["reduce_scatter"] == 4 * (root + 2 * dense)


def exchanged(axis: str, layout, stage: str = "only", **keys) -> dict[tuple[str, str], int]:
    """Return the bytes of an axis by collective and content, on LLAMA with 64 tokens of 32 numbers."""
    keys = {"micro_batch": 2, "seq": 32, "chunked_loss": True, "stack": "fsdp2", **keys}
    found = ledgers(Job(LLAMA, layout, gpu("H100-80GB"), **keys))[stage]
    return {(each.collective, each.content): each.num_bytes for each in found if each.axis == axis}


# s b h of LLAMA's rows, and its layers. A collective counts its larger side: an all-reduce over t ranks sends 2 (t - 1)
# / t of that, a reduce-scatter or an all-gather (t - 1) / t.
SBH, LAYERS = 2 * 32 * 32, 4


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallelism_sends_8_s_b_h_over_t_to_each_other_rank(size):
    """Two sums of a block each way, attention's and the MLP's: 4 x 2 (t - 1) / t s b h = (t - 1) 8 s b h / t.

    bf16 forward and fp32 backward. The sum of the embeddings, fp32, and those of the loss come once per step.
    """
    found = exchanged("tp", strategy(tp=size), stack="tp")
    forward = found["all_reduce", "hidden states"] - 4 * SBH
    backward = found["all_reduce", "gradients of hidden states"]
    assert (forward, backward) == (2 * 2 * SBH * LAYERS, 4 * 2 * SBH * LAYERS)
    sent = (forward / 2 + backward / 4) / LAYERS * 2 * (size - 1) / size
    assert sent == (size - 1) * 8 * SBH / size


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallelism_sends_as_much(size):
    """Four all-gathers and four reduce-scatters of a block, (t - 1) / t s b h each; and two more at the ends."""
    found = exchanged("tp", strategy(tp=size, sequence_parallel=True), stack="tp")
    gathered, scattered = found["all_gather", "hidden states"], found["reduce_scatter", "hidden states"]
    gathered_back = found["all_gather", "gradients of hidden states"]
    scattered_back = found["reduce_scatter", "gradients of hidden states"]
    assert (gathered, scattered_back) == (4 * 2 * SBH * LAYERS + 4 * SBH, 4 * 2 * SBH * LAYERS)
    assert (scattered, gathered_back) == (2 * 2 * SBH * LAYERS, 2 * 2 * SBH * LAYERS + 4 * SBH)
    elements = (gathered - 4 * SBH) / 4 + scattered / 2 + (gathered_back - 4 * SBH) / 2 + scattered_back / 4
    assert elements / LAYERS * (size - 1) / size == (size - 1) * 8 * SBH / size


def test_stages_exchange_4_m_s_b_h():
    """A middle stage of m = 8 micro-batches: hidden states in and out, gradients in and out; fp32 in PyTorch's."""
    layout = strategy(pp=4, schedule="1F1B")
    content = "hidden states and their gradients"
    moved_by = {
        stage: exchanged("pp", layout, stage, grad_accum=8)["send", content]
        + exchanged("pp", layout, stage, grad_accum=8)["recv", content]
        for stage in ("first", "middle", "last")
    }
    assert moved_by == {"first": 4 * 2 * 8 * SBH, "middle": 4 * 4 * 8 * SBH, "last": 4 * 2 * 8 * SBH}


def test_replicas_of_a_stage_sum_gradients_and_gather_new_weights():
    """Each stage has two of the layers of 9,280, and the tied embedding of 300 x 32; the last one has a norm, too."""
    keys = {"stack": "deepspeed", "precision": "fp32", "grad_accum": 2}
    numbers = {("all_reduce", "overflow, norm"): 2 * 4}
    for stage, held, more in (
        ("first", 300 * 32 + 2 * 9280, {}),
        ("last", 300 * 32 + 2 * 9280 + 32, {("all_reduce", "loss"): 4}),
    ):
        found = exchanged("dp", strategy(2, pp=2, zero=1, shard=2), stage, **keys)
        assert found == {("all_reduce", "gradients"): 4 * held, ("all_gather", "weights"): 4 * held, **numbers, **more}


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 2), ("full", 3)])
def test_a_ring_sends_n_1_blocks(checkpointing, passes):
    """Of 64 tokens each of 4 ranks has 16, with 2 x 16 numbers of keys and values: 512. 3 blocks go each way round.

    In bf16 in each pass, forward, recomputed and backward; and as fp32 gradients.
    """
    found = exchanged("cp", strategy(cp=4, zero=3, shard=4, exchange="ring"), checkpointing=checkpointing)
    for way in ("send", "recv"):
        assert found[way, "keys and values"] == LAYERS * passes * 3 * 512 * 2
        assert found[way, "gradients of keys and values"] == LAYERS * 3 * 512 * 4


@pytest.mark.parametrize("size", [2, 4])
def test_gathered_keys_are_those_of_whole_rows(size):
    """64 tokens with 2 x 16 numbers in bf16, whatever the number of ranks; their gradients come back."""
    found = exchanged("cp", strategy(cp=size, zero=3, shard=size, exchange="allgather"))
    assert found == {
        ("all_gather", "keys and values"): LAYERS * 64 * 32 * 2,
        ("reduce_scatter", "gradients of keys and values"): LAYERS * 64 * 32 * 2,
    }


@pytest.mark.parametrize(("size", "keys"), [(2, 16), (4, 32)])
def test_ulysses_exchanges_queries_keys_values_and_outputs(size, keys):
    """64 / n tokens with 32 + k + k + 32 numbers, forward and backward; 4 ranks share 2 key heads, each twice."""
    found = exchanged("cp", strategy(cp=size, zero=3, shard=size, exchange="ulysses"))
    assert found == {("all_to_all", "heads for sequence"): LAYERS * 2 * (64 // size) * (64 + 2 * keys) * 2}


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 4), ("full", 6)])
def test_experts_get_tokens_and_send_them_back(checkpointing, times):
    """Dispatch and combine, forward, backward and recomputed: 64 tokens x 2 experts x 32 numbers in bf16."""
    mixture = ModelShape(2, 32, 4, 2, 64, 300, gated=True, tied=True, experts=4, top_k=2)
    found = moved("fsdp2", strategy(2, zero=3, shard=2, ep=2), mixture, checkpointing=checkpointing)
    counts = (2 if checkpointing == "full" else 1) * 8 * 4  # int64, of each expert
    assert found["all_to_all"] == 2 * (times * 64 * 2 * 32 * 2 + counts)


def test_replicas_exchange_shards_and_rows_are_padded():
    flat, replicated = (moved("fsdp2", strategy(8, zero=3, shard=shard)) for shard in (8, 4))
    assert replicated["all_reduce"] * 4 == replicated["reduce_scatter"] < flat["reduce_scatter"]  # 300 rows, 8 ranks
    assert (
        moved("fsdp2", strategy(8, zero=3, shard=8), grad_accum=4, sharding=replace(FP32_SUMS, reduces_once=True))[
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
