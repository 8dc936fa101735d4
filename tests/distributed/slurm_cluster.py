"""A real SLURM cluster on one machine: a controller and two nodes, each node in a network namespace of its own.

Debian builds slurmd without --enable-multiple-slurmd, so that one network holds one node. Needs root on Linux and the
packages slurm-wlm, munge, iproute2 and openssh-server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import two_hosts

NODES = ("node1", "node2")
START_SECONDS = 60
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
CONFIGURATION = """
ClusterName=samecurve
SlurmctldHost=node1({addresses[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={node_seconds}
KillWait=30
SchedulerParameters=sched_interval=5,batch_sched_delay=0
GresTypes=gpu
NodeName=node1 NodeAddr={addresses[0]} CPUs=2 RealMemory=4000 Gres=gpu:1 State=UNKNOWN
NodeName=node2 NodeAddr={addresses[1]} CPUs=2 RealMemory=4000 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


def missing() -> str | None:
    """Why a cluster cannot be started here; None when it can."""
    absent = [name for name in PROGRAMS if not _program(name)]
    return f"apt-get install slurm-wlm munge (no {', '.join(absent)})" if absent else two_hosts.missing()


class Cluster:
    """`run` runs a command on the first node, with SLURM's commands on its path."""

    def __init__(self, folder: Path, hosts: two_hosts.TwoHosts, environment: dict[str, str]):
        self.folder, self.hosts, self.environment = folder, hosts, environment
        self._daemons: dict[str, subprocess.Popen] = {}

    def run(self, *command: str, timeout_seconds: float = 60) -> str:
        """Return the output. Raises CalledProcessError with the output in its text."""
        inside = ["ip", "netns", "exec", self.hosts.namespaces[0], *command]
        done = subprocess.run(inside, cwd=two_hosts.ROOT, env=self.environment, **_TEXT, timeout=timeout_seconds)
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> int:
        """Return the job's number."""
        return int(self.run("sbatch", "--parsable", *options, str(script)))

    def state(self, job: int) -> dict[str, str]:
        """Return what `scontrol show job` says, such as JobState, Restarts and ExitCode."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: int, *states: str, timeout_seconds: float) -> dict[str, str]:
        """Wait until the job is in one of the states. Returns what `state` does."""
        deadline = time.monotonic() + timeout_seconds
        while (found := self.state(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{found}, expected {states}\n{self.logs()}"
            time.sleep(0.5)
        return found

    def start_node(self, name: str) -> None:
        namespace = self.hosts.namespaces[NODES.index(name)]
        slurmd = f"hostname {name}; exec {_program('slurmd')} -D -N {name} -f {self.folder}/slurm.conf"
        self._start(name, ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", slurmd])

    def lose_node(self, name: str) -> None:
        """Kill every process of a node, as a power cut would."""
        two_hosts.kill_all(self.hosts.namespaces[NODES.index(name)])
        self._daemons.pop(name).wait()

    def start(self) -> None:
        munge = [f"--{option}={self.folder}/munge.{option.partition('-')[0]}" for option in _MUNGE_FILES]
        self._start("munged", [_program("munged"), "--foreground", "--force", *munge])
        slurmctld = f"hostname node1; exec {_program('slurmctld')} -D -f {self.folder}/slurm.conf"
        namespace = self.hosts.namespaces[0]
        self._start("slurmctld", ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", slurmctld])
        for name in NODES:
            self.start_node(name)
        deadline = time.monotonic() + START_SECONDS
        while self._idle() != [*NODES]:
            assert time.monotonic() < deadline, f"the nodes do not start\n{self.logs()}"
            time.sleep(0.5)

    def stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        found = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in found)

    def _idle(self) -> list[str]:
        with suppress(AssertionError):  # the controller does not answer yet
            return self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()
        return []

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}-output.log", "ab") as stream:
            self._daemons[name] = subprocess.Popen(command, env=self.environment, stdout=stream, stderr=stream)


@contextmanager
def cluster(folder: Path, node_seconds: int = 30) -> Iterator[Cluster]:
    """Start a cluster in an empty folder; it is gone afterwards, with all its processes.

    Args:
        node_seconds: after which a silent node counts as down (SlurmdTimeout).
    """
    for name in ("state", "ssh", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    text = CONFIGURATION.format(addresses=two_hosts.ADDRESSES, folder=folder, node_seconds=node_seconds)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # `ip netns exec` hides what is mounted on /sys
    (folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null\n")
    folder.chmod(0o755)  # munge's clients have to reach its socket
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts.two_hosts(folder / "ssh", {}))
        for namespace in hosts.namespaces:
            with open(f"/etc/netns/{namespace}/hosts", "a") as stream:
                stream.writelines(f"{pair[0]} {pair[1]}\n" for pair in zip(two_hosts.ADDRESSES, NODES, strict=True))
        made = Cluster(folder, hosts, {**hosts.environment, "SLURM_CONF": f"{folder}/slurm.conf"})
        stack.callback(made.stop)
        made.start()
        yield made


_TEXT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
_MUNGE_FILES = ("key-file", "socket", "pid-file", "log-file", "seed-file")


def _program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
