"""CPU cores of a process and its workers: those of its GPU's NUMA node; a warning if processes share cores."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samecurve.storage.file_lock import machine

BUSY = 1.5  # load of each core; a run alone reaches 1
NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class CpuBinding:
    """CPU resources of one process.

    Attributes:
        machine: identifies the machine, see `host.machine`.
        host: the host name, for messages.
        cores: the numbers of the cores on which the system lets the process run.
        threads: threads per operator.
        nodes: the cores of each NUMA node of the machine; nodes without cores are left out.
    """

    machine: str
    host: str
    cores: frozenset[int]
    threads: int
    nodes: tuple[frozenset[int], ...]

    @property
    def num_nodes(self) -> int:
        """Number of NUMA nodes on which the process may run."""
        return sum(bool(self.cores & node) for node in self.nodes)


def read_cpu_binding(threads: int, nodes: Path = NODES) -> CpuBinding | None:
    """Read this process's binding; None if the system does not report it (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = frozenset(os.sched_getaffinity(0))
    of_nodes = filter(None, map(_parse_cores, sorted(nodes.glob("node[0-9]*/cpulist"))))
    return CpuBinding(machine(), socket.gethostname(), cores, threads, tuple(of_nodes))


def numa_node(bus: str, devices: Path = PCI_DEVICES) -> int:
    """Return the NUMA node of a PCI device, -1 if the system does not know it.

    Args:
        bus: domain, bus, device and function, for example 0000:3b:00.0; nvidia-smi writes the domain with eight digits.
    """
    path = devices / bus.lower()[-12:] / "numa_node"
    return int(path.read_text()) if path.is_file() else -1


def bind_to_gpu(bus: str, devices: Path = PCI_DEVICES, nodes: Path = NODES) -> frozenset[int]:
    """Bind this process to the cores of its GPU's NUMA node, and return them; empty if nothing changes.

    Nothing changes where the launcher has bound the process to one node already, or the system does not tell the
    GPU's. Memory follows: Linux places a page on the node of the thread that first writes to it.
    """
    binding = read_cpu_binding(1, nodes)
    folder = nodes / f"node{numa_node(bus, devices)}"
    if binding is None or binding.num_nodes < 2 or not (folder / "cpulist").is_file():
        return frozenset()
    near = binding.cores & _parse_cores(folder / "cpulist")
    for thread in Path("/proc/self/task").iterdir() if near else ():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), near)
    return near


def affinity_advice(seats: Sequence[CpuBinding | None]) -> str:
    """Describe in one line the first host whose processes compete for cores; "" if there is none.

    Args:
        seats: the bindings of all ranks.
    """
    hosts: dict[str, list[CpuBinding]] = defaultdict(list)
    for seat in filter(None, seats):
        hosts[seat.machine].append(seat)
    for local in hosts.values():
        wide = [one for one in local if one.num_nodes > 1]
        crossing = [one for one in wide if any(one is not other and one.cores & other.cores for other in local)]
        if crossing:
            num_cores, num_nodes = len(crossing[0].cores), crossing[0].num_nodes
            return (
                f"{len(crossing)} processes on {crossing[0].host} may all run on the same {num_cores} cores of "
                f"{num_nodes} NUMA nodes, far from their memory and in each other's way; bind them: deepspeed "
                "--bind_cores_to_rank (which needs numactl)"
            )
        cores, threads = len(frozenset().union(*(one.cores for one in local))), sum(one.threads for one in local)
        # Processes with a single thread have no threads to give up.
        if len(local) > 1 and threads > cores and any(one.threads > 1 for one in local):
            return (
                f"{len(local)} processes on {local[0].host} compute with {threads} threads in all on {cores} cores, so "
                f"they wait for each other; start them with OMP_NUM_THREADS={max(1, cores // len(local))}"
            )
    return ""


def load_advice(seat: CpuBinding | None, load: float) -> str:
    """Warn about other work on the cores of a process that trains on a CPU with several threads, "" without it.

    Threads of an operator wait for the slowest one, so that a step on two busy cores can take ten times as long as
    with one thread.

    Args:
        seat: the binding of the process; the others are assumed to have as many threads on cores of their own.
        load: number of threads that run or wait for a core, mean of a minute (os.getloadavg).
    """
    if seat is None or seat.threads == 1 or load < BUSY * (cores := len(seat.cores)):
        return ""
    return (
        f"other programs are busy on this machine (load {load:.1f} on {cores} cores) while this run computes with "
        f"{seat.threads} threads that wait for each other; OMP_NUM_THREADS=1 may be several times faster"
    )


def _parse_cores(path: Path) -> frozenset[int]:
    """Parse a node's cpulist, for example "0-15,32-47", empty for a node that has only memory.

    Format: Linux's Documentation/ABI/stable/sysfs-devices-node.
    """
    ranges = re.findall(r"(\d+)(?:-(\d+))?", path.read_text(encoding="ascii"))
    return frozenset(core for first, last in ranges for core in range(int(first), int(last or first) + 1))


_PR_SET_PDEATHSIG = 1  # option of Linux's prctl: the signal that a process gets when its parent ends


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(num_processes: int) -> int:
    """Number of cores per process if `num_processes` share this process's cores; at least one."""
    return max(1, num_cores() // num_processes)


def init_worker(*_: object) -> None:
    """Set up signals and garbage collection of a worker process, and end it when its parent ends (on Linux)."""
    # Signals sent to all processes by the terminal or a launcher are meant for the training process. A forked worker
    # inherits that process's handlers, which would write the run's status.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.enable()  # the parent collects on a schedule (gc_schedule.py), which does not run in workers
    # A worker also inherits the lock and connections by which other processes see whether the parent is alive.
    # PyTorch's data loader workers check for their parent only every 5 seconds, those of a pool never.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
