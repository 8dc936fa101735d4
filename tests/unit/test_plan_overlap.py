"""`plan --overlap`: every exchange that the step time counts, with its sizes and what it hides behind."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_planner_anatomy import LLAMA, a_job, strategy

from samecurve.cli.commands import main
from samecurve.planner import inputs, kernels, ledger, overlap, search, step_time
from samecurve.planner.cluster import built_in
from samecurve.planner.hardware import Profile
from samecurve.planner.job import Job, axis_link
from samecurve.planner.overlap import Ratio
from samecurve.planner.stages import stages
from samecurve.planner.strategies import read
from samecurve.specs.gpus import MIB

MODEL = "benchmarks/planner/llama_8b.json"
H100, NVLINK = 989e12, 450e9
SHIPPED = sorted(path for path in Path("configs").glob("*.yaml") if path.stem not in ("single", "tp"))
PARTS = ("data_parallel", "tensor_parallel", "context_parallel", "expert_parallel", "pipeline_sends")


def planned(tmp_path: Path, path: Path, gpus: int, *settings: str) -> Job:
    model = json.loads(Path(MODEL).read_text())
    if "_ep" in path.stem:
        model |= {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(model))
    wanted = inputs.read(str(tmp_path / "config.json"), list(settings))
    (choice,) = search.evaluate(wanted, built_in("h100x8").scaled(gpus), [read(str(path))])
    assert choice.job, choice.reason
    return choice.job


def rows(job: Job) -> dict[str, Ratio]:
    return {each.axis: each for each in overlap.ratios(job)}


def test_keys_around_a_ring_by_hand():
    """Each of 4 ranks has 1,024 tokens: 2 x 2,048 numbers each, 3 times forward and backward in 2 bytes, 3 times in 4.

    Beside them, three quarters of attention: 2 s a FLOPs per token under the causal mask, forward and 2.5 times that.
    Full recomputation repeats the forward's. The bytes are those of the ledger, which real runs equal.
    """
    job = a_job(strategy=strategy(cp=4), gpu_kind="H100-80GB")
    constants, link = Profile(), axis_link(job, "cp", Profile())
    assert step_time.key_bytes(job) == 1024 * 2 * 2048 * 2
    sends, attention = step_time.ring_seconds(job, constants)
    assert sends == pytest.approx((6 + 3 * 2) * 8_388_608 / (link.bus_gb_per_s * 1e9) + 9 * link.step_seconds)
    rate = 0.5 * 0.75 * 0.88 * 794.5e12  # a fused kernel's share, less on an H100, of its sustained products
    assert attention == pytest.approx(3 / 4 * 3.5 * 1024 * 2 * 4096 * 2048 / rate)
    recomputed = replace(job, checkpointing="full")
    assert step_time.ring_seconds(recomputed, constants)[1] == pytest.approx(attention * 4.5 / 3.5)
    for each in (job, recomputed):
        of_a_layer = each.shape.layers * each.grad_accum
        exchanges = ledger.ledger(each, stages(each, False)[0])
        sent = sum(one.num_bytes for one in exchanges if (one.axis, one.collective) == ("cp", "send")) / of_a_layer
        assert step_time.ring_sends(each)[1] == pytest.approx(sent)


def test_exchanges_inside_a_node_attain_the_bandwidth_of_their_payload():
    """Keys and values of 4 ranks are 32 MiB when gathered, and each rank's copies for 8 experts are 32 MiB, too."""
    share = 275.84 / 482.26  # hardware.json, 32 MiB by 16 GiB
    gathered = a_job(strategy=strategy(cp=4), gpu_kind="H100-80GB")
    link, passes = axis_link(gathered, "cp", Profile()), 2
    expected = 3 * 8 * MIB / (share * link.bus_gb_per_s * 1e9) + 3 * link.step_seconds + step_time.COLLECTIVE_SECONDS
    gathered = replace(gathered, strategy=strategy(cp=4, exchange="allgather"))
    assert step_time.context_seconds(gathered, Profile()) == pytest.approx(passes * expected)
    mixture = a_job(strategy=strategy(dp=8, ep=8), gpu_kind="H100-80GB")
    mixture = replace(mixture, shape=replace(mixture.shape, experts=8, top_k=2))
    link, calls = axis_link(mixture, "dp", Profile(), 8), 4
    expected = 7 / 8 * 32 * MIB / (share * link.bus_gb_per_s * 1e9) + 7 * link.step_seconds
    imbalance = step_time.expert_imbalance(mixture)
    assert step_time.expert_seconds(mixture, Profile()) == pytest.approx(calls * imbalance * expected)


def test_a_ring_hides_its_sends_behind_the_attention_that_the_step_counts():
    """This project's ring has no fused kernel: two products at 0.6 of large ones' rate, and 64 bytes per score."""
    job, constants = replace(a_job(strategy=strategy(cp=4), gpu_kind="H100-80GB"), flow="16-bit"), Profile()
    pairs = 4096 * 1024 / 2  # of tokens that see each other, in each of 32 heads of width 64
    seconds = 4 * pairs * 2048 / (0.85 * 0.6 * 0.88 * 794.5e12) + 64 * pairs * 32 / 3350e9
    _, attention = step_time.ring_seconds(job, constants)
    assert attention == pytest.approx(3 / 4 * 3.5 * seconds)
    assert attention == pytest.approx(3 / 4 * kernels.attention_seconds(job, constants).total)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_the_rows_add_is_what_the_step_table_shows(path, tmp_path):
    assert len(SHIPPED) > 20
    for gpus in (8, 16):
        job = planned(tmp_path, path, gpus)
        found, whole = overlap.ratios(job), step_time.breakdown(job)
        for part in PARTS:
            added = sum(each.exposed for each in found if each.part == part)
            assert added == pytest.approx(getattr(whole, part)), part


def test_a_verdict_is_that_of_the_step_table():
    """HSDP over a slow network: what the forward pass gathers is hidden, the sum over replicas in the backward not."""
    job = a_job(strategy=strategy(16, zero=3, shard=8), stack="fsdp2", node_gbit=400)
    found = rows(job)
    forward, across = (
        found[f"data parallel, {name}"] for name in ("gather of weights", "all-reduce of shards over replicas")
    )
    assert forward.verdict.startswith("hidden") and 0 < forward.exposed < forward.seconds
    assert across.verdict.startswith("exposed") and across.value > 1
    assert "n=2 over the network" in across.inputs and "n=8 over the node" in forward.inputs
    assert sum(each.exposed for each in found.values()) == pytest.approx(step_time.breakdown(job).data_parallel)


def test_ranks_of_dp_and_cp_shard_together():
    """4 x 2 ranks are one group of 8 in one node; with tp 2, eight neighbours at distance 2 are in two nodes."""
    one = rows(a_job(strategy=strategy(4, cp=2, zero=3, shard=8, exchange="allgather"), stack="fsdp2"))
    assert "n=8 over the node" in one["data parallel, gather of weights"].inputs
    two = rows(a_job(strategy=strategy(4, cp=2, tp=2, zero=3, shard=8, exchange="allgather"), stack="fsdp2"))
    alone = rows(a_job(strategy=strategy(8, tp=2, zero=3, shard=8), stack="fsdp2"))
    name = "data parallel, gather of weights"
    assert "n=8 over the network" in two[name].inputs
    assert two[name].inputs.partition(", B=")[2] == alone[name].inputs.partition(", B=")[2]


def test_sizes_are_those_of_the_precision():
    """fp32 gathers and sends 4 bytes; gradients of bf16 weights are reduced in 4, and PyTorch's stages send 4."""
    job = a_job(
        strategy=strategy(2, tp=2, zero=3, shard=2), stack="fsdp2", sharding=replace(a_job().sharding, reduce_bytes=4)
    )
    half, single = rows(job), rows(replace(job, precision="fp32", states=replace(job.states, weights=4)))
    widths = {
        axis: [float(found[axis].inputs.split("e=")[1].split(",")[0]) for found in (half, single)] for axis in half
    }
    assert widths == {
        "data parallel, gather of weights": [2, 4],
        "data parallel, gather of weights, again": [2, 4],
        "data parallel, reduce-scatter of gradients": [4, 4],
        "tensor parallel, all-reduce of hidden states": [2, 4],
    }
    (sends,) = (
        each for each in overlap.ratios(a_job(strategy=strategy(1, pp=2, schedule="1F1B"))) if each.axis[:2] == "pi"
    )
    assert "e=4" in sends.inputs


@pytest.mark.parametrize(("precision", "rate"), [("bf16", 700), ("fp32", 60), ("fp8", 1300)])
def test_the_rate_is_that_of_the_precision(precision, rate):
    card = replace(a_job().card, matmul_tflops=700, fp32_tflops=60, fp8_tflops=1300)
    (found,) = overlap.ratios(replace(a_job(), precision=precision, card=card))
    assert f"F={rate} TFLOP/s" in found.inputs


def test_exchanges_inside_layers_wait_or_hide():
    """With sequence parallelism a sum is cut in two; overlapped products hide half of it; a ring hides what it can."""
    plain, cut = (
        rows(a_job(strategy=strategy(1, tp=8, sequence_parallel=sequence), seq=8192)) for sequence in (False, True)
    )
    assert [*cut] == [f"tensor parallel, {name} of hidden states" for name in ("all-gather", "reduce-scatter")]
    (whole,) = plain.values()
    assert whole.seconds == pytest.approx(sum(each.seconds for each in cut.values()))
    assert whole.verdict.startswith("not overlapped") and whole.exposed == pytest.approx(whole.seconds)
    hidden = overlap.ratios(replace(a_job(strategy=strategy(1, tp=8), seq=8192), async_tp=True))[0]
    assert hidden.verdict.startswith("hidden") and hidden.exposed < whole.exposed
    for exchange, verdict in (("ring", "hidden"), ("allgather", "not overlapped"), ("ulysses", "not overlapped")):
        found = overlap.ratios(a_job(strategy=strategy(1, cp=8, exchange=exchange), seq=131072))[-1]
        assert found.axis.startswith("context parallel") and found.verdict.startswith(verdict)
    mixture = a_job(replace(LLAMA, experts=8, top_k=2), strategy(8, ep=8))
    assert overlap.ratios(mixture)[-1].verdict.startswith("not overlapped")


def test_small_payloads_attain_less_of_a_link():
    """The sum of 2,048 numbers for 1,024 tokens in bf16, 4 MiB, on 8 ranks: 7/8 of it twice, each after 7 x 4 us.

    At 4 MiB a node attains 107.16 of 482.26 GB/s. Of 64 MiB it attains more.
    """
    small, large = (
        overlap.ratios(a_job(strategy=strategy(1, tp=8), seq=seq, async_tp=True))[0].inputs for seq in (1024, 16384)
    )
    attained = [float(re.findall(r" a layer at (\S+) GB/s", each)[0]) for each in (small, large)]
    sent = 2 * 7 / 8 * 4 * 2**20
    seconds = sent / (361.4e9 * 107.16 / 482.26) + 2 * 7 * 4e-6 + step_time.COLLECTIVE_SECONDS
    assert attained[0] == pytest.approx(sent / seconds / 1e9, rel=0.01)
    assert attained[0] < attained[1] < 361.4 and all("B=361 GB/s" in each for each in (small, large))


def test_ratios_of_exchanges_inside_layers_by_hand():
    """Ring of 8, s = 32,768, a quarter of the keys: 2 x 0.25 x 8 x 989e12 / (32,768 x 450e9) = 0.2683."""
    assert overlap.textbook_ring(32768, 8, 0.25, H100, NVLINK) == pytest.approx(0.2683, abs=5e-5)
    # 2,048 elements of keys and values to one rank, for 218,103,808 weights: 2 x 2048 x 989e12 / (2 x P x 450e9)
    found = overlap.textbook_exchanged_layer(2048, 218_103_808, 2, H100, NVLINK)
    assert found == pytest.approx(0.02064, abs=5e-6)


def test_the_command_names_the_level(capsys):
    command = ["plan", MODEL, "--cluster", "h100x8", "--gpus", "8", "--strategy", "configs/fsdp_cp.yaml", "--overlap"]
    assert main([*command, "memory.activation_checkpointing=full", "batch.sequence_length=32768"]) == 0
    shown = capsys.readouterr().out.partition("communication / computation")[2]
    assert "n=8 over the node" in shown and "n=2 over the node" in shown and "network" not in shown


def test_a_small_model_under_zero3_is_gathered_once_per_micro_batch(tmp_path):
    job = planned(tmp_path, Path("configs/zero3.yaml"), 8)
    small = replace(job.shape, layers=2, hidden=512, heads=8, kv_heads=8, ffn=1024, vocab=1024)
    listed = rows(replace(job, shape=small))
    assert "data parallel, gather of weights" in listed and "data parallel, gather of weights, again" not in listed
