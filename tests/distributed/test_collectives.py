"""`samecurve bench collectives` under a launcher of several machines."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import two_hosts
from harness import BIN, ROOT

from samecurve.bench.collectives import COLLECTIVES
from samecurve.distributed.network import free_port

QUICK = ["--backend", "gloo", "--largest", "4KiB", "--seconds", "0.001"]


@pytest.mark.full
def test_two_agents_of_torchrun_are_two_machines(tmp_path):
    """Two machines as far as torchrun knows: an agent each, which meet at an address."""
    port, file = free_port(), tmp_path / "found.json"

    def agent(rank: int) -> subprocess.CompletedProcess:
        meet = ["--node_rank", str(rank), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *meet]
        bench = ["-m", "samecurve", "bench", "collectives", *QUICK, "--collectives", "all_reduce,send_recv"]
        command = [*torchrun, *bench, "--json", str(file)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    with ThreadPoolExecutor() as agents:
        first, second = agents.map(agent, range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "gloo, 2 processes on 2 machines, fp32" in first.stdout and "machines" not in second.stdout
    found = json.loads(file.read_text())
    assert (found["machines"], found["processes"], found["backend"]) == (2, 2, "gloo")
    assert [each["name"] for each in found["timings"]] == ["all_reduce"] * 2 + ["send_recv"] * 2


@pytest.mark.full
def test_two_hosts_measure_the_cable_between_them(workspace, tmp_path):
    reason = two_hosts.missing()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    file = workspace.folder / "collectives.json"
    with two_hosts.two_hosts(tmp_path, {"OMP_NUM_THREADS": "1"}) as hosts:
        launcher = ["--hostfile", str(hosts.hostfile), "--no_ssh_check", "--master_addr", two_hosts.ADDRESSES[0]]
        bench = ["--no_local_rank", "--module", "samecurve", "bench", "collectives", *QUICK, "--json", str(file)]
        run = hosts.run([str(BIN / "deepspeed"), *launcher, *bench], ROOT, timeout_seconds=300)
        assert run.returncode == 0, run.stdout
        assert hosts.received_bytes() > 50_000
    found = json.loads(file.read_text())
    assert (found["machines"], found["processes"]) == (2, 2)
    assert {each["name"] for each in found["timings"]} | found["not_offered"].keys() == set(COLLECTIVES)


WORKED = """
import pathlib, sys, time, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=3)
summed, reduced, part = torch.tensor([rank + 1.0]), torch.tensor([rank + 1.0]), torch.zeros(2)
dist.all_reduce(summed)
dist.reduce(reduced, 0)
rows = [torch.tensor([((rank + 1.0) * i) ** (j + 1) for i in (1, 2)]) for j in range(3)]
dist.reduce_scatter(part, rows)
time.sleep(rank / 4)
folder = pathlib.Path(sys.argv[3])
(folder / str(rank)).touch()
dist.barrier()
print(summed.item(), reduced.item() if rank == 0 else "-", part.tolist(), len([*folder.iterdir()]))
"""


@pytest.mark.full
def test_collectives_of_three_ranks(tmp_path):
    """The playbook's numbers: 1 + 2 + 3; sums of ((r + 1) i)^(j + 1) for i = 1, 2 at rank j; all have arrived."""
    command, arrived = [sys.executable, "-c", WORKED], tmp_path / "arrived"
    arrived.mkdir()
    store = f"file://{tmp_path}/store"
    ranks = [
        subprocess.Popen([*command, str(rank), store, str(arrived)], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    found = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    assert found == ["6.0 6.0 [6.0, 12.0] 3", "6.0 - [14.0, 56.0] 3", "6.0 - [36.0, 288.0] 3"]
