"""A run on two hosts that loses one at random times, by a power cut or a cut cable, and takes it back.

The lines that it adds to $SAMECURVE_FAULT_RESULTS are a section of benchmarks/reliability.md.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import two_hosts
from harness import BIN, ROOT, Run, Workspace, append_result

from samecurve.run.run_directory import read_metrics

pytestmark = pytest.mark.full

NUM_LOSSES = int(os.environ.get("SAMECURVE_TEST_LOSSES", "20"))
EVERY = 10
SETTINGS = (f"checkpoint.every_steps={EVERY}", "schedule.name=constant", "evaluate.every_steps=1000000")
HANG_SECONDS = 60  # a cut cable is silent: only the watchdog notices
WAIT_SECONDS = 600


class Pair:
    """torchrun on two hosts, as `launch --min_nodes 1` prints it. The first host stays."""

    def __init__(self, hosts: two_hosts.TwoHosts, workspace: Workspace, directory: Path):
        self.hosts, self.directory = hosts, directory
        own = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "SAMECURVE_CACHE", "TOKENIZERS_PARALLELISM")
        self.environment = hosts.environment | {name: workspace.environment()[name] for name in own}
        command = [BIN / "python", "-m", "samecurve", "launch", workspace.recipe, *SETTINGS, "steps=1000000"]
        command += [f"output_dir={directory}", f"watchdog.timeout_seconds={HANG_SECONDS}", "checkpoint.keep=2"]
        command += ["--strategy", "configs/ddp.yaml", "--hostfile", hosts.hostfile, "--min_nodes", "1"]
        printed = subprocess.check_output([*command, "--launcher", "torchrun"], cwd=ROOT, text=True)
        self._commands = [line for line in printed.splitlines() if not line.startswith("#")]
        self._agents: dict[int, subprocess.Popen] = {}
        self._outputs = [directory.with_name(f"{directory.name}.host{host}.txt") for host in range(2)]

    def start(self, host: int) -> None:
        inside = ["ip", "netns", "exec", self.hosts.namespaces[host], "sh", "-c", f"exec {self._commands[host]}"]
        with open(self._outputs[host], "ab") as stream:
            self._agents[host] = subprocess.Popen(inside, cwd=ROOT, env=self.environment, stdout=stream, stderr=stream)

    def lose(self, how: str) -> None:
        """Take the second host away: all its processes, or its cable."""
        if how == "killed":
            two_hosts.kill_all(self.hosts.namespaces[1])
        else:
            self.hosts.plug("down")

    def clear(self) -> None:
        """End what a host without a cable still runs, and plug it in again."""
        two_hosts.kill_all(self.hosts.namespaces[1])
        self._agents[1].wait()
        self.hosts.plug("up")

    def seconds_until_step(self, world_size: int) -> float:
        """Wait until a session of this size that begins from now on has done a step."""
        began, wall = time.monotonic(), time.time()
        facts = self.directory / "run.json"

        def has_begun() -> bool:
            with suppress(OSError, ValueError):
                return facts.stat().st_mtime > wall and json.loads(facts.read_text())["world_size"] == world_size
            return False

        self._wait_for(has_begun, f"{world_size} processes")
        first = self.step
        self._wait_for(lambda: self.step > first, f"a step of {world_size} processes")
        return time.monotonic() - began

    @property
    def step(self) -> int:
        with suppress(ValueError):  # the last line is being written
            metrics = read_metrics(self.directory)
            return metrics[-1]["step"] if metrics else 0
        return 0

    @property
    def resumed_after(self) -> int:
        """The step that the newest session went on from."""
        found = re.findall(r"resuming after step (\d+)|(moved the files of an earlier run)", self.output)
        return int(found[-1][0] or 0)

    @property
    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self._outputs[:1])

    def stop(self) -> None:
        self._agents[0].send_signal(signal.SIGTERM)
        self._agents[0].wait(WAIT_SECONDS)

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert self._agents[0].poll() is None, f"the first host ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited too long for {what}:\n{self.output}"
            time.sleep(0.1)


@pytest.fixture
def pair(tmp_path, battery) -> Iterator[Pair]:
    reason = two_hosts.missing()
    if reason:
        pytest.skip(f"two hosts: {reason}")
    with two_hosts.two_hosts(tmp_path, {}) as hosts:
        yield Pair(hosts, battery.workspace, battery.workspace.folder / "lost_host")


def test_a_host_is_lost_and_comes_back(pair, battery):
    draw, records = random.Random(0), []
    pair.start(0)
    pair.start(1)
    pair.seconds_until_step(2)
    for _ in range(NUM_LOSSES):
        time.sleep(draw.uniform(0, 10))
        records.append(lose_and_return(pair, draw.choice(["killed", "cable cut"])))
    pair.stop()
    run = Run(pair.directory, 0, pair.output)
    golden = battery.workspace.run("ddp", 2, *SETTINGS, f"steps={len(run.metrics)}", "checkpoint.keep=2")
    equal = all(
        run.column(key) == pytest.approx(golden.column(key), rel=tolerance, abs=0)
        for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4))
    )
    for record in records:
        append_result(record | {"resumed_equal": equal})
    assert equal
    assert [record for record in records if record["lost_steps"] > 2 * EVERY] == []  # one may be being written
    assert [record for record in records if record["lost_steps_at_return"] > EVERY] == []


def lose_and_return(pair: Pair, how: str) -> dict:
    record = {"kind": "host", "strategy": "ddp", "fault": how}
    last = pair.step
    pair.lose(how)
    record["seconds_alone"] = round(pair.seconds_until_step(1), 1)
    record["lost_steps"] = last - pair.resumed_after
    pair.clear()
    last = pair.step
    pair.start(1)
    record["seconds_together"] = round(pair.seconds_until_step(2), 1)
    record["lost_steps_at_return"] = max(last - pair.resumed_after, 0)
    return record
