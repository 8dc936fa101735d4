"""The path of a new user on two hosts, as docs/clusters.md tells it: doctor, rehearsal, start, a lost host, elsewhere.

What is printed with `pytest -s` is what the page shows, with its paths shortened.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import s3_server
import two_hosts
from harness import BIN, ROOT, Run, largest_relative_difference, relative_l2
from s3_server import BUCKET, Server
from two_hosts import TwoHosts

from samecurve.checkpoint.manifest import folder_name

pytestmark = [pytest.mark.full, pytest.mark.skipif(not s3_server.PACKAGES, reason=s3_server.MISSING)]

STEPS, LOST_AFTER = 30, 20
SETTINGS = (f"output_dir=s3://{BUCKET}/run", f"steps={STEPS}", "checkpoint.every_steps=10")
SECONDS = 240


class User:
    """Types commands on a host; what comes back is printed and kept."""

    def __init__(self, hosts: TwoHosts, settings: dict[str, str], folder: Path):
        self.hosts, self.settings, self.folder = hosts, settings, folder

    def types(self, host: int, *words: str, hurt: Callable[[], None] = lambda: None, **more: str) -> tuple[int, str]:
        """Returns the exit code and the output. hurt: called once the command runs."""
        shown = [*(f"{name}={value}" for name, value in more.items()), *words]
        print(f"\nhost {host + 1}$ {' '.join(shown)}")
        inside = ["ip", "netns", "exec", self.hosts.namespaces[host], *words]
        with open(self.folder / "said.txt", "w+") as said:
            environment = {**self.settings, **more}
            process = subprocess.Popen(inside, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)
            try:
                hurt()
                code = process.wait(SECONDS)
            finally:
                process.kill()
            said.seek(0)
            output = said.read()
        print(f"{output}[exit code {code}]")
        return code, output


@pytest.fixture
def hosts(tmp_path) -> Iterator[TwoHosts]:
    reason = two_hosts.missing()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    with two_hosts.two_hosts(tmp_path, {}) as made:
        yield made


@pytest.fixture
def server(hosts) -> Iterator[Server]:
    inside = ("ip", "netns", "exec", hosts.namespaces[0])
    with s3_server.server(hosts.folder, two_hosts.ADDRESSES[0], inside) as made:
        yield made


def test_the_path_of_a_new_user(hosts, server, battery, tmp_path):
    workspace, local = battery.workspace, Path("s3", BUCKET, "run")
    expected = workspace.run(None, 1, "batch.micro_batch_size=8", f"steps={STEPS}")
    store = s3_server.settings(server.port, server.address)
    user = User(hosts, hosts.environment | workspace.environment() | store, tmp_path)
    recipe, zero3 = [str(workspace.recipe), *SETTINGS], ["--strategy", "configs/zero3.yaml"]
    command = [str(BIN / "python"), "-m", "samecurve"]

    code, said = user.types(0, *command, "doctor", *recipe, *zero3, "--hostfile", str(hosts.hostfile))
    assert code == 0 and "the same on 2 hosts" in said

    code, said = user.types(0, *command, "rehearse", *recipe, *zero3, "--num_processes", "2")
    assert code == 0 and "everything fits" in said

    def lose_the_second_host() -> None:
        deadline = time.monotonic() + SECONDS
        while server.newest_step() < LOST_AFTER:
            assert time.monotonic() < deadline, server.keys()
            time.sleep(0.5)
        two_hosts.kill_all(hosts.namespaces[1])
        print("(the second host is lost)")

    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    launch = ["launch", *recipe, *zero3, "--hostfile", str(hosts.hostfile), "--launcher", "torchrun", "--start"]
    slow = ",".join(f"step@{step}:0:slow" for step in range(LOST_AFTER + 2, STEPS))  # so that the loss finds it running
    user.settings |= {"SAMECURVE_FAULTS": slow, "SAMECURVE_STAGING": str(here)}
    code, said = user.types(0, *command, *launch, hurt=lose_the_second_host)
    started = Run(here / local, code, said)
    assert code != 0 and (started.facts["strategy"], started.facts["world_size"]) == ("zero3", 2)

    del user.settings["SAMECURVE_FAULTS"], user.settings["SAMECURVE_STAGING"]
    fsdp = ["--strategy", "configs/fsdp.yaml", "--num_processes", "2"]
    train = [str(BIN / "python"), "train.py", *recipe, *fsdp]
    code, said = user.types(1, *train, SAMECURVE_STAGING=str(elsewhere))
    found = Run(elsewhere / local, code, said)
    assert code == 0 and f"fetched s3://{BUCKET}/run/checkpoints/{folder_name(LOST_AFTER)}" in said
    assert f"resuming after step {LOST_AFTER}" in said and found.facts["strategy"] == "fsdp"
    assert found.column("step") == expected.column("step")
    assert largest_relative_difference(found.column("loss"), expected.column("loss")) < 1e-5
    assert largest_relative_difference(found.column("grad_norm"), expected.column("grad_norm")) < 1e-4
    assert relative_l2(found.weights, expected.weights) < 1e-4
