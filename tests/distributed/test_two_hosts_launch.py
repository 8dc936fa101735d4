"""`launch --start` over two hosts that share nothing of the network: every launcher gives the losses of one host."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import two_hosts
from harness import BIN, ROOT, Run, Workspace

pytestmark = pytest.mark.full
SETTINGS = ("steps=6",)
SIX_ROWS = ("batch.global_batch_size=6", "batch.micro_batch_size=2")
FIRST, SECOND = two_hosts.ADDRESSES


@pytest.fixture
def hosts(tmp_path, workspace) -> Iterator[two_hosts.TwoHosts]:
    reason = two_hosts.missing()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    with two_hosts.two_hosts(tmp_path, {}) as made:
        own = {"SAMECURVE_CACHE": str(workspace.folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        made.environment = {**made.environment, **own}
        yield made


def launch(workspace: Workspace, directory: Path, strategy: str, *more: str) -> list[str]:
    command = [str(BIN / "python"), "-m", "samecurve", "launch", str(workspace.recipe), f"output_dir={directory}"]
    return [*command, *SETTINGS, "--strategy", f"configs/{strategy}.yaml", "--start", *more]


def running(hosts: two_hosts.TwoHosts) -> list[str]:
    """The command lines of all processes of both hosts."""
    listed = (["ip", "netns", "pids", each] for each in hosts.namespaces)
    pids = [pid for each in listed for pid in subprocess.check_output(each, text=True).split()]
    return [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]


def assert_same_curve(found: Run, expected: Run) -> None:
    assert (found.returncode, expected.returncode) == (0, 0), found.output + expected.output
    assert found.facts["strategy"] == expected.facts["strategy"]
    assert found.facts["world_size"] == expected.facts["world_size"]
    assert found.column("loss") == pytest.approx(expected.column("loss"), rel=1e-6, abs=0)
    assert found.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-6, abs=0)


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        ("torchrun", "fsdp"),
        ("torchrun", "zero3"),
        ("accelerate", "fsdp"),
        ("accelerate", "zero3"),
        ("deepspeed", "zero3"),
    ],
)
def test_every_launcher_trains_like_one_host(launcher, strategy, hosts, workspace):
    two_hosts.skip_without_quotes(launcher)
    directory = workspace.folder / f"launched_{launcher}_{strategy};a&b%n"  # for a shell, and for pdsh
    command = launch(workspace, directory, strategy, "--hostfile", str(hosts.hostfile), "--launcher", launcher)
    done = hosts.run(command, ROOT, timeout_seconds=600)
    found = Run(directory, done.returncode, done.stdout)
    assert_same_curve(found, workspace.run(strategy, 2, *SETTINGS))
    assert found.facts["launcher"] == launcher
    assert hosts.received_bytes() > 200_000  # less would be the launcher's own talk


@pytest.mark.parametrize("filter", ["--include {}:1,2@{}:0", "--exclude {}:0@{}:1"])
def test_the_slots_that_are_picked_start(filter, hosts, workspace):
    """Of three slots on the first host and two on the second: ranks 0 and 1 there, rank 2 here."""
    two_hosts.skip_without_quotes("deepspeed")
    hosts.hostfile.write_text(f"{FIRST} slots=3\n{SECOND} slots=2\n")
    option, slots = filter.format(FIRST, SECOND).split()
    directory = workspace.folder / f"launched_{option[2:]}"
    more = ["--hostfile", str(hosts.hostfile), "--launcher", "deepspeed", option, slots, *SIX_ROWS]
    done = hosts.run(launch(workspace, directory, "zero2", *more), ROOT, timeout_seconds=600)
    started = re.findall(r"num_local_procs=(\d+), node_rank=(\d+)", done.stdout)
    devices = re.findall(r"^(\S+): .*Setting CUDA_VISIBLE_DEVICES=(\S*)", done.stdout, re.MULTILINE)
    assert sorted(started) == [("1", "1"), ("2", "0")], done.stdout
    assert dict(devices) == {FIRST: "1,2", SECOND: "0"}, done.stdout
    assert_same_curve(Run(directory, done.returncode, done.stdout), workspace.run("zero2", 3, *SETTINGS, *SIX_ROWS))


def test_a_signal_saves_on_both_hosts(hosts, workspace):
    directory = workspace.folder / "launched_and_stopped"
    more = ["--hostfile", str(hosts.hostfile), "--launcher", "torchrun", "steps=100000"]
    command = ["ip", "netns", "exec", hosts.namespaces[0], *launch(workspace, directory, "ddp", *more)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=hosts.environment, **output)
    metrics, deadline = directory / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # `ip netns exec` has become the command
    said, _ = process.communicate(timeout=120)
    status = Run(directory, process.returncode, said).status
    assert (status["state"], status["exit_code"]) == ("preempted", 75), said
    assert process.returncode != 0
    assert not [name for name in running(hosts) if "train.py" in name]
