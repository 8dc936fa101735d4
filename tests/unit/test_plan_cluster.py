"""Cluster files: what they change in a plan, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planner_anatomy import a_job, strategy

from samecurve.cli.commands import main
from samecurve.errors import ConfigurationError
from samecurve.planner import cluster, links, memory, step_time, strategies
from samecurve.planner.cluster import read_cluster
from samecurve.planner.hardware import gpu
from samecurve.planner.job import Sharding, StateBytes
from samecurve.planner.links import Level
from samecurve.planner.model_shape import Frozen
from samecurve.specs.gpus import GIB

FILE = """\
gpu: H100-80GB
nodes: 128
gpus_per_node: 8
links:
  - {level: node, size: 8, bus_gb_per_s: 360, latency_us: 8}
  - {level: rack, size: 32, gbit_per_s_per_node: 3200, latency_us: 20}
  - {level: cluster, gbit_per_s_per_node: 1600, bus_gb_per_s: {32: 65, 64: 33}, latency_us: 25}
host: {memory_gib: 1000, cpu_cores: 192, pcie_gb_per_s: 50, nvme_gb_per_s: 7}
reserved_gib: 2.5
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    return path


def link(levels, ranks: int, stride: int = 1) -> links.Link:
    return links.link(levels, 8, ranks, stride, 1.0, 10e-6)


def test_a_group_uses_the_outermost_level_that_it_crosses(path):
    machines = read_cluster(str(path))
    assert machines.gpus == 1024 and machines.host.cpu_cores == 192
    assert link(machines.levels, 8) == links.Link("node", 360, 8e-6)
    assert link(machines.levels, 32) == links.Link("rack", 3200 / 8 * 0.73, 20e-6)
    # measured values win over nominal ones: 65 and 33 GB/s, and their geometric mean half-way between
    for ranks, rate in ((64, 33), (1024, 33)):
        assert link(machines.levels, ranks) == links.Link("cluster", rate, 25e-6)
    assert machines.levels[-1].bus_gb_per_s(32) == 65
    assert machines.levels[-1].bus_gb_per_s(45) == pytest.approx((65 * 33) ** 0.5, rel=0.01)
    # one rank per node under TP 8: an eighth of the node's bandwidth, all groups at once
    assert link(machines.levels, 128, stride=8) == links.Link("cluster", 33 / 8, 25e-6)
    assert link(machines.levels, 4, stride=8).level == "rack"


def test_a_level_without_numbers_takes_the_defaults(path):
    path.write_text("gpu: H100-80GB\nnodes: 2\ngpus_per_node: 8\nlinks:\n  - {level: node}\n")
    found = read_cluster(str(path))
    card, nominal = found.card.bus_gb_per_s, found.file.gbit_per_s_per_node
    assert found.levels == (Level("node", 8, ((1, card),)), Level("network", 0, node_gbit=nominal))
    path.write_text("gpu: H100-80GB\nnodes: 2\ngpus_per_node: 8\ngbit_per_s_per_node: 3200\n")
    plain, built_in = read_cluster(str(path)), read_cluster("h100x8").scaled(16)
    job = a_job(strategy=strategy(16, zero=3, shard=16), node_gbit=3200)
    times = [step_time.breakdown(each).total for each in (job, replace(job, levels=plain.levels))]
    assert times[0] == pytest.approx(times[1])
    assert plain.gpus == built_in.gpus and plain.host == built_in.host


def test_what_is_written_is_read_again(path):
    machines = read_cluster(str(path))
    path.write_text(cluster.cluster_text(machines))
    assert read_cluster(str(path)) == machines
    device = "device: {memory_gib: 40, peak_tflops: {bf16: 300, fp32: 20}, hbm_gb_per_s: 1500}\n"
    path.write_text(device + "nodes: 1\ngpus_per_node: 4\nlinks: [{level: node, bus_gb_per_s: 100}]\n")
    machines = read_cluster(str(path))
    assert machines.card.matmul_tflops == 240 and machines.card.fp32_tflops == 16
    path.write_text(cluster.cluster_text(machines))
    assert read_cluster(str(path)) == machines


def test_reserved_memory_replaces_context_and_nccl(path):
    job = a_job(strategy=strategy(8))
    (own,), (given,) = memory.anatomy(job), memory.anatomy(replace(job, reserved_gib=2.5))
    names = [[line.name for line in memory.overhead(each)] for each in (own, given)]
    assert names == [["fragmentation", "context", "NCCL"], ["fragmentation", "reserved"]]
    difference = memory.counted(given, "nvidia_smi") - memory.counted(own, "nvidia_smi")
    assert difference / GIB == pytest.approx(2.5 - memory.CONTEXT_GIB - memory.NCCL_GIB)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("latency_us: 20", "latency: 20"), "cluster.yaml:6: links.1.latency: unknown key"),
        (("nodes: 128", "nodes: 0"), "cluster.yaml:2: nodes: found 0, expected a number of at least 1"),
        (("nodes: 128\n", ""), "nodes: missing"),
        (("H100-80GB", "Q100"), "cluster.yaml:1: gpu: found"),
        (("size: 32", "size: 4"), "expected the first to be gpus_per_node (8) and each to be larger"),
        (
            ("{32: 65, 64: 33}", "{few: 65}"),
            "links.2.bus_gb_per_s: found a block of keys, expected numbers of ranks",
        ),
        (("cpu_cores", "cores"), "cluster.yaml:8: host.cores: unknown key"),
        (("reserved_gib: 2.5", "reserved_gib: some"), "cluster.yaml:9: reserved_gib: found"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_line(path, change, message):
    path.write_text(FILE.replace(*change))
    with pytest.raises(ConfigurationError) as raised:
        read_cluster(str(path))
    assert message in str(raised.value)


def test_offloading_takes_host_memory_and_time():
    """7.5e9 parameters on 8 GPUs: optimizer states 16 bytes each, 111.8 GiB; gradients of 2 bytes over 50 GB/s."""
    job = a_job(strategy=strategy(8, zero=2, shard=8, offload=("optimizer:cpu",)), stack="fsdp2")
    scale = 7.5e9 / job.shape.parameters
    assert memory.offloaded_gib(job) * scale == pytest.approx(16 * 7.5e9 / GIB)
    # DeepSpeed's ZeRO-2 has 16-bit weights, too, and with accumulation 16-bit sums; ZeRO-3 fp32 sums
    two = replace(job, stack="deepspeed", grad_accum=1)
    three = replace(two, strategy=strategy(8, zero=3, shard=8, offload=("optimizer:cpu", "param:cpu")))
    for each, size in ((two, 18), (replace(two, grad_accum=2), 20), (three, 22)):
        assert memory.offloaded_gib(each) * scale == pytest.approx(size * 7.5e9 / GIB)
    shard = 1e9
    transfers = (4 * 2 + 2) * shard / (job.host.pcie_gb_per_s * 1e9)  # gradients of 4 micro-batches, and weights
    update = step_time.UPDATE_BYTES * shard * 8 / (2e9 * job.host.cpu_cores)
    assert step_time.offload_seconds(job, shard) == pytest.approx(transfers + update)
    assert step_time.offload_seconds(replace(job, strategy=strategy(8, zero=2, shard=8)), shard) == 0
    slower = replace(job, strategy=strategy(8, zero=2, shard=8, offload=("optimizer:nvme", "param:nvme")))
    assert step_time.offload_seconds(slower, shard) > step_time.offload_seconds(job, shard)


@pytest.mark.parametrize(
    ("text", "kind", "row", "count"),
    [
        ("mi300xx8", "MI300X", "MI300X", 8),
        ("v100x4", "V100", "V100-32GB", 4),
        ("v100-16gbx8", "V100-16GB", "V100-16GB", 8),
        ("L40Sx8", "L40S", "L40S", 8),
        ("rtx-4090x2", "RTX-4090", "RTX 4090", 2),
        ("a100_40gbx8", "A100-40GB", "A100-40GB", 8),
    ],
)
def test_any_gpu_with_known_rates_is_a_kind(text, kind, row, count, tmp_path):
    machines = read_cluster(text)
    assert (machines.kind, machines.gpus_per_node, machines.card) == (kind, count, gpu(row))
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster.cluster_text(machines))
    assert read_cluster(str(path)) == machines


@pytest.mark.parametrize("text", ["q100x8", "v100", "v100x0", "rtx-4090-dx2"])
def test_an_unknown_kind_is_told_what_else_there_is(text):
    with pytest.raises(ConfigurationError) as raised:
        read_cluster(text)
    for each in (f"--cluster {text}: expected a cluster file (.yaml, see Cluster files in docs/planning.md)", "L40S"):
        assert each in str(raised.value)


def test_processes_share_the_memory_of_their_host(tmp_path):
    four = read_cluster("cpux4")
    assert (read_cluster("cpux1").card.memory_gib, four.card.memory_gib, four.host.memory_gib) == (64, 16, 64)
    assert (four.scaled(2).card.memory_gib, four.scaled(8).card.memory_gib) == (32, 16)
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster.cluster_text(four))
    assert read_cluster(str(path)).card.memory_gib == 16
    path.write_text("gpu: cpu\nnodes: 1\ngpus_per_node: 8\nhost: {memory_gib: 256}\n")
    found = read_cluster(str(path))
    assert found.card.memory_gib == 32
    # a GPU has its own
    assert read_cluster("h100x4").card.memory_gib == read_cluster("h100x8").card.memory_gib


def test_offloading_of_weights_takes_time_in_each_micro_batch():
    """4 micro-batches; FSDP2 moves fp32 weights to the GPU twice and fp32 gradients back, ZeRO-3 both in 16 bits."""
    shard, both = 1e9, ("optimizer:cpu", "param:cpu")
    zero = a_job(strategy=strategy(8, zero=3, shard=8, offload=both), stack="deepspeed")
    fsdp = replace(zero, stack="fsdp2", states=strategies.TORCH_STATES)
    update, lanes = step_time.UPDATE_BYTES * shard * 8 / (2e9 * zero.host.cpu_cores), zero.host.pcie_gb_per_s * 1e9
    assert step_time.offload_seconds(zero, shard) == pytest.approx(4 * (2 * 2 + 2) * shard / lanes + update)
    assert step_time.offload_seconds(fsdp, shard) == pytest.approx(4 * (2 * 4 + 4) * shard / lanes + update)
    stays = Sharding(reshards=False, reduces_once=True)
    moved = (4 * 4 + 4) * shard / lanes
    assert step_time.offload_seconds(replace(fsdp, sharding=stays), shard) == pytest.approx(moved + update)


def test_an_offloaded_adapter_updates_itself_alone():
    """1 % of the weights are trained: 0.04 bytes of gradients and 2.04 of weights per element."""
    shard, frozen = 1e9, Frozen(trained=0.01, weight_bytes=2, layer_bytes=2)
    job = a_job(strategy=strategy(8, zero=3, shard=8, offload=("optimizer:cpu", "param:cpu")), stack="fsdp2")
    job = replace(job, frozen=frozen, states=StateBytes(0, 0.04, 0, 0, 0))
    update = 0.01 * step_time.UPDATE_BYTES * shard * 8 / (2e9 * job.host.cpu_cores)
    transfers = 4 * (2 * 2.04 + 0.04) * shard / (job.host.pcie_gb_per_s * 1e9)
    assert step_time.offload_seconds(job, shard) == pytest.approx(transfers + update)
    disk = replace(job, strategy=strategy(8, zero=2, shard=8, offload=("optimizer:nvme",)))
    written = 0.01 * 24 * shard * job.gpus_per_node / (job.host.nvme_gb_per_s * 1e9)
    back = (4 * 0.04 + 0.02) * shard / (job.host.pcie_gb_per_s * 1e9)
    assert step_time.offload_seconds(disk, shard) == pytest.approx(written + back + update)


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        ("a100x8", (2000, 128, 27)),
        ("A100-SXM4-80GBx8", (2000, 128, 27)),
        ("a100_40gbx8", (1000, 128, 27)),
        ("rtx-4090x1", (2000, 112, 27)),
        ("v100-16gbx8", (2000, 112, 14)),
        ("h100x8", (2000, 112, 55)),
    ],
)
def test_a_host_of_each_kind_of_gpu(kind, host):
    machines = read_cluster(kind)
    assert (machines.host.memory_gib, machines.host.cpu_cores, machines.host.pcie_gb_per_s) == host


def test_host_memory_that_is_assumed_is_told_and_does_not_fit_for_sure(tmp_path, capsys):
    """16 B of states, 2 B of weights and 4 B of sums for each of 8,030,261,248 parameters are 164.5 GiB."""
    config, cluster = "benchmarks/planner/llama_8b.json", tmp_path / "cluster.yaml"
    arguments = ["plan", config, "--strategy", "configs/zero3_offload.yaml", "batch.global_batch_size=8"]
    assert main([*arguments, "--cluster", "h100x1"]) == 0
    assert "165 of 2,000 GiB of host memory per node (assumed), tight (" in capsys.readouterr().out
    cluster.write_text("{gpu: H100-80GB, nodes: 1, gpus_per_node: 1, host: {memory_gib: 500}}")
    assert main([*arguments, "--cluster", str(cluster)]) == 0
    assert "165 of 500 GiB of host memory per node, fits (" in capsys.readouterr().out
