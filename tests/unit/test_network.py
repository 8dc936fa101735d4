"""The network interface of gloo, on hosts whose addresses and routes are made up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from samecurve.bench import jobs, memory_probe
from samecurve.distributed import network
from samecurve.errors import TopologyError

ROOT = Path(__file__).resolve().parents[2]
TWO_HOSTS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
INTERFACES = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "192.168.7.1": "ib0"}


@pytest.fixture
def host(monkeypatch):
    """A host with these addresses, from which each destination is reached with one of them."""

    def made(addresses: dict[str, str], routes: dict[str, str]) -> None:
        monkeypatch.setattr(network, "_addresses", lambda: addresses)
        monkeypatch.setattr(network, "source_address", lambda to: routes.get(to, ""))

    return made


def chosen(**environ: str) -> str | None:
    given = TWO_HOSTS | environ
    network.choose_interface(given)
    return given.get(network.VARIABLE)


def test_the_interface_of_the_route_to_the_master_is_taken(host):
    host(INTERFACES, {"node0": "192.168.7.1", network._ELSEWHERE: "10.0.0.1"})
    assert chosen() == "ib0"
    assert chosen(LOCAL_SIZE="2") == "ib0"
    assert chosen(GLOO_SOCKET_IFNAME="eth0") == "eth0"


def test_a_master_whose_own_name_is_loopback_takes_the_default_route_or_the_only_interface(host):
    host(INTERFACES, {"node0": "127.0.0.1", network._ELSEWHERE: "10.0.0.1"})
    assert chosen() == "eth0"
    host({"127.0.0.1": "lo", "10.0.0.1": "eth0", "fe80::1": "eth0"}, {"node0": "127.0.0.1"})
    assert chosen() == "eth0"


def test_what_cannot_be_known_is_asked_for(host):
    host(INTERFACES, {"node0": "127.0.0.1"})
    with pytest.raises(TopologyError, match=r"GLOO_SOCKET_IFNAME: not set.*'node0'.*\(eth0, ib0\).*on every host"):
        chosen()


@pytest.mark.parametrize(
    "environ",
    [{"LOCAL_WORLD_SIZE": "4"}, {"MASTER_ADDR": "localhost"}, {"WORLD_SIZE": "1"}],
)
def test_on_one_machine_with_a_name_nothing_is_set(environ, host):
    host(INTERFACES, {"node0": "192.168.7.1"})
    assert chosen(**environ) is None


def test_with_a_loopback_address_one_machine_uses_loopback(host):
    host(INTERFACES, {"node0": "192.168.7.1"})
    given = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    network.choose_interface(given)
    assert (given["GLOO_SOCKET_IFNAME"], given["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert chosen(MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE="4", GLOO_SOCKET_IFNAME="eth0") == "eth0"


@pytest.mark.parametrize(
    ("interfaces", "routes", "expected"),
    [
        (INTERFACES, {network._ELSEWHERE: "10.0.0.1"}, "eth0"),
        ({"127.0.0.1": "lo", "10.0.0.1": "eth0"}, {}, "eth0"),
        (INTERFACES, {}, None),
        ({"127.0.0.1": "lo"}, {}, None),
    ],
)
def test_with_a_loopback_address_several_hosts_use_no_loopback(interfaces, routes, expected, host):
    """They meet through a tunnel, or are rehearsed on one machine, where any interface does."""
    host(interfaces, {"127.0.0.1": "127.0.0.1"} | routes)
    given = TWO_HOSTS | {"MASTER_ADDR": "127.0.0.1"}
    network.choose_interface(given)
    assert (given.get("GLOO_SOCKET_IFNAME"), given.get("NCCL_SOCKET_IFNAME")) == (expected, None)


RANK = """
import os
from datetime import timedelta
from samecurve.launch import ranks
if "SAMECURVE_PROCESSES" not in os.environ:
    ranks.start_and_exit(2)
import psutil, torch, torch.distributed as dist
from samecurve.distributed import network
network.choose_interface()
dist.init_process_group("gloo", init_method=network.rendezvous(), timeout=timedelta(seconds=60))
group, number = dist.new_group(), torch.ones(1)
dist.all_reduce(number, group=group)
listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
os.write(1, f"{number.item():.0f} {' '.join(sorted(listening))}\\n".encode())
dist.barrier()
"""


def test_the_ranks_of_one_machine_listen_on_loopback_alone(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(tmp_path / "rank.py")]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["2 127.0.0.1", "2 127.0.0.1", ""])


def test_a_benchmarks_processes_listen_on_loopback_alone(tmp_path, monkeypatch):
    """`bench collectives` and `bench memory` start any module so, and connect as below."""
    own = RANK.partition('if "SAMECURVE_PROCESSES"')[0] + RANK.partition("start_and_exit(2)\n")[2]
    (tmp_path / "bench_rank.py").write_text(own)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    words = [sys.executable, *jobs.RANKS, "2", "-m", "bench_rank"]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["2 127.0.0.1", "2 127.0.0.1", ""])
    calls = []
    for name, value in {"MASTER_ADDR": "127.0.0.1", network.VARIABLE: "lo", "NCCL_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(memory_probe.dist, "init_process_group", lambda *_, **options: calls.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memory_probe.connect("gloo", torch.device("cpu"))
    assert calls == [{"init_method": "loopback://"}]


def test_two_nodes_rehearsed_without_a_network_meet_over_loopback(host):
    """torchrun gives the host's name as master address, also where no other host can be reached."""
    host({"127.0.0.1": "lo"}, {"node0": "127.0.0.1"})
    assert chosen() is None


def test_the_system_is_read_as_it_is(monkeypatch):
    """Loopback is left out, and the route to an address of this host has that address as its source."""
    assert network.source_address("127.0.0.1") == "127.0.0.1"
    assert network.source_address("no-such-host.invalid") == ""
    address, loopback = (SimpleNamespace(family=socket.AF_INET, address=text) for text in ("10.0.0.1", "127.0.0.1"))
    up, down = (SimpleNamespace(isup=state) for state in (True, False))
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": up, "eth0": up, "eth1": down})
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [loopback], "eth0": [address], "eth1": [address]})
    assert network.interfaces() == {"10.0.0.1": "eth0"}
