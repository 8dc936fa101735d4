"""What `launch --launcher slurm` prints, under SLURM on two nodes: losses, time limit, scancel, a failed node."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest
import slurm_cluster
from harness import BIN, ROOT, Run, Workspace
from slurm_cluster import Cluster

pytestmark = pytest.mark.full
SETTINGS = ("steps=12", "checkpoint.every_steps=4")
ENDLESS = (
    "steps=100000",
    "checkpoint.every_steps=5",
    "checkpoint.keep=2",
    "evaluate.every_steps=100000",
    "schedule.name=constant",
)
WAIT_SECONDS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(f"SLURM: {reason}")
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as made:
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": f"{BIN}:{made.environment['PATH']}"}
        made.environment |= own
        yield made


class Job:
    """A job whose script `launch` has printed; its run directory and output are named after it."""

    def __init__(self, cluster: Cluster, workspace: Workspace, name: str, settings: tuple[str, ...], *options: str):
        self.cluster, self.directory = cluster, workspace.folder / name
        self.output = workspace.folder / f"{name}.txt"
        script = workspace.folder / f"{name}.sh"
        cluster.environment["SAMECURVE_CACHE"] = str(workspace.folder / "cache")
        command = [BIN / "python", "-m", "samecurve", "launch", workspace.recipe, *settings]
        command += [f"output_dir={self.directory}", "--strategy", "configs/ddp.yaml", "--nodes", "2"]
        command += ["--gpus_per_node", "1", "--launcher", "slurm", "--output", script]
        subprocess.run(command, cwd=ROOT, check=True)
        self.number = cluster.submit(script, f"--output={self.output}", *options)

    def wait_for(self, *states: str) -> dict[str, str]:
        return self.cluster.wait_for(self.number, *states, timeout_seconds=WAIT_SECONDS)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while self.last_step() < step:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def last_step(self) -> int:
        metrics = self.directory / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def cancel(self) -> None:
        self.cluster.run("scancel", str(self.number))

    def said(self) -> str:
        return (self.output.read_text() if self.output.exists() else "") + self.cluster.logs()

    def run(self, code: int = 0) -> Run:
        return Run(self.directory, code, self.said())


def assert_same_steps(found: Run, expected: Run) -> None:
    """The steps that both have are the same."""
    steps = min(len(found.metrics), len(expected.metrics))
    assert steps >= 5, found.output
    for key in ("loss", "grad_norm"):
        assert found.column(key)[:steps] == pytest.approx(expected.column(key)[:steps], rel=1e-6, abs=0), key


def test_a_job_has_the_losses_of_one_host(cluster, workspace):
    job = Job(cluster, workspace, "slurm_job", SETTINGS)
    state = job.wait_for("COMPLETED", "FAILED")
    assert state["JobState"] == "COMPLETED", job.said()
    found, expected = job.run(), workspace.run("ddp", 2, *SETTINGS)
    assert (found.facts["launcher"], found.facts["world_size"]) == ("srun", 2)
    assert len(found.metrics) == 12
    assert_same_steps(found, expected)


def test_the_doctor_examines_every_task(cluster, workspace):
    command = [str(BIN / "python"), "-m", "samecurve", "doctor", str(workspace.recipe)]
    command += [f"output_dir={workspace.folder / 'examined'}", "--timeout_seconds", "20"]
    said = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *command, timeout_seconds=WAIT_SECONDS)
    assert "packages   node1, node2: " in said and "read on 2, lock held" in said, said
    assert "over 2 processes on 2 hosts" in said, said


def test_a_job_out_of_time_saves_and_goes_on(cluster, workspace):
    """SLURM tells it to stop a minute or two before the end; it saves and is queued again, and goes on from there."""
    job = Job(cluster, workspace, "slurm_time", ENDLESS, "--time=4", "--signal=TERM@60")
    job.wait_for_step(6)
    state = job.wait_for("PENDING", "COMPLETED", "FAILED", "TIMEOUT")
    assert state["JobState"] == "PENDING", job.said()
    saved = job.run().status
    assert (saved["state"], saved["exit_code"]) == ("preempted", 75), job.said()
    job.wait_for_step(saved["step"] + 3)
    assert job.cluster.state(job.number)["Restarts"] == "1"
    job.cancel()
    state = job.wait_for("CANCELLED", "PENDING")
    assert f"resuming after step {saved['step']}" in job.said()
    assert_same_steps(job.run(), workspace.run("ddp", 2, *ENDLESS, "steps=12"))


def test_scancel_saves_and_does_not_return_to_the_queue(cluster, workspace):
    job = Job(cluster, workspace, "slurm_cancelled", ENDLESS)
    job.wait_for_step(3)
    job.cancel()
    job.wait_for("CANCELLED")
    found, deadline = job.run(), time.monotonic() + 60
    while (status := job.run().status)["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (status["state"], status["exit_code"]) == ("preempted", 75), found.output
    assert job.cluster.state(job.number)["JobState"] == "CANCELLED"


def test_a_job_goes_on_after_its_node_failed(cluster, workspace):
    job = Job(cluster, workspace, "slurm_node", ENDLESS)
    job.wait_for_step(7)
    cluster.lose_node("node2")
    state = job.wait_for("PENDING", "FAILED", "NODE_FAIL")
    assert state["JobState"] == "PENDING", job.said()
    cluster.start_node("node2")
    last = job.last_step()
    job.wait_for_step(last + 3)
    assert int(job.cluster.state(job.number)["Restarts"]) >= 1
    assert "resuming after step" in job.said()
    job.cancel()
    job.wait_for("CANCELLED")
    assert_same_steps(job.run(), workspace.run("ddp", 2, *ENDLESS, "steps=12"))
