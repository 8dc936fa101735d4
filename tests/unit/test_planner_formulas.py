"""The planner's formulas against worked numbers of published sources."""

from __future__ import annotations

import pytest
from test_planner_anatomy import strategy

from samecurve.planner import data_parallel_time, links, overlap
from samecurve.planner.hardware import Profile, gpu
from samecurve.planner.job import Job
from samecurve.planner.kernels import Seconds
from samecurve.planner.model_shape import ModelShape
from samecurve.planner.stages import stage_parameters, stages
from samecurve.specs.gpus import MIB
from samecurve.strategy.timetables import idle_slots

H100, NVLINK, NETWORK = 989e12, 450e9, 50e9


@pytest.mark.parametrize(("tokens", "ratio"), [(4096, 0.4695), (8192, 0.2347), (16384, 0.1174)])
def test_data_parallel_overlap(tokens, ratio):
    assert overlap.textbook_data_parallel(tokens, 8, H100, NVLINK) == pytest.approx(ratio, abs=5e-5)


@pytest.mark.parametrize("layers", [4, 32])
def test_the_size_of_the_model_cancels(layers):
    """The playbook's first erratum: 2 e P (n - 1) / (n B) over 4 T P / F keeps no factor of the parameters P."""
    shape = ModelShape(layers, 4096, 32, 32, 16384, 32000, gated=True, tied=True)
    job = Job(shape, strategy(8), gpu("H100-80GB"), 1, 4096)
    stage = stages(job, False)[0]
    _, (reduced,) = data_parallel_time.transfers(job, stage, Profile())
    backward = 4 * job.tokens * sum(stage_parameters(job, stage)) / H100
    assert reduced.volume_bytes / NVLINK / backward == pytest.approx(0.4695, abs=5e-5)


@pytest.mark.parametrize(("ranks", "bandwidth", "ratio"), [(8, NVLINK, 0.4695), (64, NETWORK, 4.754)])
def test_fully_sharded_overlap(ranks, bandwidth, ratio):
    # The source prints 4.754; e (n - 1) / n F / (2 s b B) is 4.7537 by hand.
    found = overlap.textbook_data_parallel(4096, ranks, H100, bandwidth)
    assert found == pytest.approx(ratio, rel=2e-4)


@pytest.mark.parametrize(("hidden", "ratio"), [(4096, 3.756), (8192, 1.878)])
def test_tensor_parallel_overlap(hidden, ratio):
    assert overlap.textbook_tensor_parallel(hidden, 8, H100, NVLINK) == pytest.approx(ratio, rel=2e-4)


def test_pipeline_overlap():
    assert overlap.textbook_pipeline(4096, 4, H100, NETWORK) == pytest.approx(0.0755, abs=5e-5)


def test_sizes_are_bytes_not_elements():
    """The playbook's second erratum: fp32 doubles every ratio. The third: Adam and master take 12 bytes a parameter."""
    half, single = (overlap.textbook_tensor_parallel(4096, 8, H100, NVLINK, size) for size in (2, 4))
    assert single == 2 * half


def test_ring_all_reduce():
    assert links.all_reduce_volume(5, 5) == 8
    assert links.all_gather_volume(5, 5) == 4
    assert links.all_reduce_volume(1, 10**6) == pytest.approx(2, rel=1e-5)


def test_latency_times_steps_is_the_curve_between_nodes():
    """All-reduce of 32 B200s on 4 nodes: 62 steps of 7 us and 381.8 GB/s, from 1 MiB to 16 GiB."""
    rates = (
        5.37,
        10.38,
        18.9,
        35.12,
        64.43,
        91.19,
        156.74,
        197.94,
        229.09,
        326.9,
        361.99,
        372.42,
        377.34,
        380.39,
        381.8,
    )
    over = links.Link("network", 381.8, 7e-6)
    for payload, rate in ((MIB << index, rate) for index, rate in enumerate(rates)):
        volume = links.all_reduce_volume(payload, 32)
        assert links.collective_seconds(volume, 32, over, payload) == pytest.approx(volume / rate / 1e9, rel=0.22), (
            payload
        )


@pytest.mark.parametrize(("count", "formula", "published"), [(24, 22.6, 24.3), (32, 17.9, 19.9), (64, 9.9, 12.4)])
def test_bubble_of_1f1b_is_below_the_published_one(count, formula, published):
    idle = idle_slots("1f1b", 8, count)
    found = 100 * idle / (count + idle)
    assert found == pytest.approx(formula, abs=0.05) and 1.5 < published - found < 2.6


def test_bubbles_of_other_schedules():
    """In units of a micro-batch: interleaving divides 1F1B's 7 by its chunks, zero bubble by three or to nothing."""
    assert idle_slots("interleaved", 8, 24, 3) == pytest.approx(7 / 3)
    assert (idle_slots("zb-2p", 8, 24), idle_slots("zb-1p", 8, 24)) == (0, pytest.approx(7 / 3))


@pytest.mark.parametrize(
    ("layout", "passes"),
    [
        (strategy(1024), [2]),
        (strategy(1024, zero=1, shard=1024), [1, 1]),
        (strategy(1024, zero=3, shard=1024), [1, 1, 1]),
    ],
)
def test_communication_of_a_step(layout, passes):
    """2P for DDP, P + P for ZeRO-1 and 3P for ZeRO-3, in parameters (CS336's lectures), with many ranks."""
    shape = ModelShape(4, 4096, 32, 32, 16384, 32000, gated=True, tied=True)
    job = Job(shape, layout, gpu("H100-80GB"), 1, 4096, stack="textbook")
    stage = stages(job, False)[0]
    parts = data_parallel_time.overlapped(job, stage, Profile(), Seconds(1, 2))
    sent = [each.volume_bytes / each.width / shape.parameters for part in parts for each in part.transfers]
    assert sent == pytest.approx(passes, rel=2e-3)
