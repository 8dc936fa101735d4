"""`plan --layout`: ranks, nodes and groups against lists by hand, and the engines' own arrangement of ranks."""

from __future__ import annotations

import json

import pytest
from test_planner_anatomy import a_job, strategy

from samecurve.cli.commands import main
from samecurve.planner import placement
from samecurve.strategy.parallel_dims import ParallelDims

SIXTEEN = strategy(2, tp=2, pp=4, schedule="1f1b")


def test_sixteen_gpus_of_megatron():
    """TP 2, PP 4: tensor-parallel groups are neighbours, stages are 4 ranks apart; two nodes of 8."""
    job = a_job(strategy=SIXTEEN)
    found = {each.name: each for each in placement.groups(job)}
    assert found["tp"].first == (0, 1) and found["dp"].first == (0, 2) and found["pp"].first == (0, 4, 8, 12)
    assert found["tp"].nodes == 1 and found["tp"].link.level == "node" and found["pp"].nodes == 2
    picture = placement.picture(job, 32).splitlines()
    assert picture[1] == "node 0    | p0d0t0 p0d0t1 p0d1t0 p0d1t1 p1d0t0 p1d0t1 p1d1t0 p1d1t1 |"
    assert "pp 4: over 2 nodes, neighbours 4 ranks apart" in "\n".join(picture)


def test_a_node_of_tensor_parallelism():
    """The contract's picture: TP 8 in a node, PP 8 sixteen nodes apart, an eighth of the network for each DP group."""
    job = a_job(strategy=strategy(16, tp=8, pp=8, schedule="1f1b"), node_gbit=3200)
    picture = placement.picture(job, 32).splitlines()
    assert picture[1] == "node 0    | t0 t1 t2 t3 t4 t5 t6 t7 |  stage 0, data-parallel rank 0"
    assert picture[2].endswith("|  stage 0, data-parallel rank 1")
    assert picture[12] == "... 116 more nodes in the same order" and picture[13].startswith("node 127")
    whole, shared = (
        {each.name: each for each in placement.groups(a_job(strategy=layout, node_gbit=3200))}["dp"].link.bus_gb_per_s
        for layout in (strategy(128), strategy(16, tp=8, pp=8, schedule="1f1b"))  # 16 nodes each
    )
    assert shared == pytest.approx(whole / 8)


def test_hybrid_sharding_shards_inside_a_node():
    job = a_job(strategy=strategy(16, zero=3, shard=8))
    shard, replica = placement.groups(job)
    assert (shard.name, shard.nodes, shard.link.level) == ("shard", 1, "node")
    assert (replica.first, replica.link.level) == ((0, 8), "network")
    assert placement.picture(job, 32).splitlines()[2].endswith("s6 s7 |  replica 1")


def test_fsdp_gathers_over_the_parts_of_a_row_too():
    """By hand: dp 8 x cp 2 on two nodes of 8 are one group of 16; the mesh of the engines has the same ranks."""
    job = a_job(strategy=strategy(8, cp=2, zero=3, shard=16))
    found = {each.name: each for each in placement.groups(job)}
    assert found.keys() == {"cp", "dp x cp"}
    whole = found["dp x cp"]
    assert (len(whole.first), whole.first, whole.nodes, whole.link.level) == (16, tuple(range(16)), 2, "network")
    assert (found["cp"].first, found["cp"].nodes) == ((0, 1), 1)
    assert whole.link == placement.group_link(job, 16, 1, placement.profile(""))
    assert "dp x cp 16: over 2 nodes, " in placement.picture(job, 32)


def test_hybrid_sharding_with_context_parallelism():
    """2 replicas x 4 shards x 2 parts: weights are sharded over 8 neighbours, and each shard has a copy 8 ranks on."""
    job = a_job(strategy=strategy(8, cp=2, zero=3, shard=8))
    assert job.dims == ParallelDims(dp_replicate=2, dp_shard=4, cp=2)
    found = {each.name: each for each in placement.groups(job)}
    assert found["shard x cp"].first == tuple(range(8)) and found["replica"].first == (0, 8)


def test_second_copies_of_weights_are_listed():
    """ZeRO-3 over 16 ranks, whose second gather is among 8 neighbours."""
    found = {each.name: each for each in placement.groups(a_job(strategy=strategy(16, zero=3, shard=16, secondary=8)))}
    assert found["dp"].nodes == 2
    assert (found["second copy"].first, found["second copy"].link.level) == (tuple(range(8)), "node")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (strategy(1, tp=16), "tp 16 crosses nodes of 8 GPUs"),
        (strategy(4, tp=6), "tp 6 does not divide 8 GPUs per node"),
        (strategy(4, tp=6), "32 heads are not divisible by tp 6"),
        (strategy(2, pp=3), "16 layers are not divisible by pp 3"),
        (strategy(2, cp=3), "4096 tokens of a row are not divisible by 2 x cp 6"),
    ],
)
def test_what_is_wrong_is_said(layout, message):
    assert message in "\n".join(placement.complaints(a_job(strategy=layout)))


def test_a_good_layout_has_no_complaints():
    assert list(placement.complaints(a_job(strategy=SIXTEEN, gpus_per_node=4))) == []
    assert placement.uneven_rows(32, a_job(strategy=strategy(8))) == []
    assert placement.uneven_rows(33, a_job(strategy=strategy(8))) == [
        "33 rows on 8 ranks: 1 of them read 5, the others 4"
    ]


def test_the_command_draws_the_layout(tmp_path, capsys):
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "vocab_size": 32000}
    config.write_text(json.dumps({"model_type": "llama", **sizes}))
    command = ["plan", str(config), "--cluster", "h100x8", "--gpus", "32", "--strategy", "configs/pipeline.yaml"]
    assert main([*command, "--layout"]) == 0
    shown = capsys.readouterr().out
    assert "node 3    | d8  d9 " in shown and "stage 1" in shown
