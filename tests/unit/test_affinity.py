"""Which processes share cores, on machines that are only described; and what this one says of itself."""

from __future__ import annotations

import os

import pytest
from report_cases import missing

from samecurve.accelerator import cpu_bridge
from samecurve.distributed import affinity
from samecurve.distributed.affinity import CpuBinding, affinity_advice, load_advice, read_cpu_binding

TWO_NODES = {"node0": "0-3,8-11\n", "node1": "4-7,12-15\n", "node2": "\n"}  # the last one is memory alone
LEFT, RIGHT = frozenset([0, 1, 2, 3, 8, 9, 10, 11]), frozenset([4, 5, 6, 7, 12, 13, 14, 15])
ALL = LEFT | RIGHT


def machine(folder, nodes):
    for name, cpulist in nodes.items():
        (folder / name).mkdir()
        (folder / name / "cpulist").write_text(cpulist)
    (folder / "possible").write_text("0-2\n")
    return folder


def seats(*of_ranks, threads=1, host="a", nodes=(LEFT, RIGHT)):
    return [CpuBinding(f"{host} 1", host, frozenset(each), threads, nodes) for each in of_ranks]


def test_a_process_says_what_it_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4}, raising=False)
    found = read_cpu_binding(6, machine(tmp_path, TWO_NODES))
    assert (found.cores, found.threads, found.nodes) == ({2, 3, 4}, 6, (LEFT, RIGHT))
    assert found.num_nodes == 2
    assert read_cpu_binding(6, tmp_path / "none").nodes == ()


def test_macos_does_not_tell(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert read_cpu_binding(1) is None
    assert affinity_advice([None, None]) == ""


def test_processes_that_run_anywhere():
    assert affinity_advice(seats(ALL, ALL)).startswith(
        "2 processes on a may all run on the same 16 cores of 2 NUMA nodes, far from their memory and in each other's "
        "way; bind them: deepspeed --bind_cores_to_rank"
    )


def bound(tmp_path, monkeypatch, node, cores):
    """The cores of a process that might run on `cores` and has a GPU on `node`, and what each of its threads got."""
    (tmp_path / "nodes").mkdir()
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text(f"{node}\n")
    threads = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", threads.__setitem__, raising=False)
    near = affinity.bind_to_gpu("0000:3B:00.0", tmp_path, machine(tmp_path / "nodes", TWO_NODES))
    assert set(map(int, os.listdir("/proc/self/task"))) >= set(threads) and (os.getpid() in threads) == bool(near)
    assert set(threads.values()) <= {near}
    return near


@pytest.mark.parametrize(
    ("node", "cores", "near"),
    [
        (1, ALL, RIGHT),
        (1, {0, 1, 4, 5}, {4, 5}),  # what taskset or a container leaves
        (1, LEFT, set()),  # the launcher's choice stays
        (1, RIGHT, set()),
        (-1, ALL, set()),  # a virtual machine does not tell
        (2, ALL, set()),  # memory alone
    ],
)
def test_process_near_its_gpu(tmp_path, monkeypatch, node, cores, near):
    assert bound(tmp_path, monkeypatch, node, frozenset(cores)) == near


def test_unknown_gpu_binds_nothing(tmp_path):
    assert affinity.numa_node("00000000:99:00.0", tmp_path) == -1
    assert affinity.bind_to_gpu("0000:99:00.0", tmp_path) == frozenset()


@pytest.mark.parametrize(
    "of_ranks",
    [
        [ALL],  # one process
        [LEFT, LEFT, RIGHT, RIGHT],  # each on its GPU's node, as accelerate and torchrun bind
        [{0, 1}, {2, 3}, {4, 5}],  # apart, as DeepSpeed binds
        [LEFT | {4}, RIGHT - {4}],  # apart, although over two nodes
    ],
)
def test_processes_with_room(of_ranks):
    assert affinity_advice(seats(*of_ranks)) == ""


def test_one_node_has_no_far_memory():
    assert affinity_advice(seats(ALL, ALL, nodes=(ALL,))) == ""
    assert affinity_advice(seats(ALL, ALL, nodes=())) == ""


def test_more_threads_than_cores():
    found = affinity_advice(seats(LEFT, LEFT, LEFT, threads=4))
    assert not missing(found, ("3 processes", "12 threads", "8 cores", "OMP_NUM_THREADS=2"))
    assert affinity_advice(seats(LEFT, LEFT, threads=4)) == ""
    assert affinity_advice(seats({0}, {0}, threads=1)) == ""  # nothing to give away


def test_threads_among_other_programs():
    (seat,) = seats(ALL, threads=2)
    cores = len(ALL)
    assert "OMP_NUM_THREADS=1" in load_advice(seat, 2.0 * cores)
    assert load_advice(seat, 1.2 * cores) == ""  # the run itself
    assert load_advice(seats(ALL, threads=1)[0], 9.0 * cores) == load_advice(None, 99.0) == ""


def test_hosts_are_looked_at_one_by_one():
    alone = seats(ALL, host="a") + seats(ALL, host="b")
    assert affinity_advice(alone) == ""
    assert " on b " in affinity_advice(seats(ALL) + seats(ALL, ALL, host="b"))


def test_real_nodes_can_be_read():
    found = read_cpu_binding(1)
    assert found is None or found.cores and (not affinity.NODES.is_dir() or found.num_nodes >= 1)


def test_a_strategy_that_binds_can_be_rehearsed(monkeypatch):
    """enable_cpu_affinity in a YAML: Accelerate looks for the GPU's cores and fails where there is none."""
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    for name in ("ACCELERATE_TORCH_DEVICE", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "cpu")
    cpu_bridge.prepare(distributed=False, sharded=False, deepspeed=False)
    assert "ACCELERATE_CPU_AFFINITY" not in os.environ
