"""The machines of a plan: a built-in kind such as h100x8, or a cluster file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.planner.calibration import Calibration
from samecurve.planner.goodput import Reliability
from samecurve.planner.hardware import PROCESS_GIB, Gpu, gpu
from samecurve.planner.links import Level

# Kind of GPU and nominal Gbit/s of a node's network cards: NVIDIA's DGX data sheets.
KINDS = {
    "a100": ("A100-80GB", 1600.0),
    "a100_40gb": ("A100-40GB", 1600.0),
    "h100": ("H100-80GB", 3200.0),
    "h200": ("H200", 3200.0),
    "b200": ("B200", 3200.0),
    "cpu": ("cpu", 100.0),  # each process is one device; see CPU in hardware.py
}


@dataclass(frozen=True)
class Host:
    """A node beside its GPUs: memory, cores, and GB/s between a GPU and host memory, and to a local disk."""

    memory_gib: float = 2000
    cpu_cores: float = 112
    pcie_gb_per_s: float = 55
    nvme_gb_per_s: float = 6


# NVIDIA's DGX data sheets: DGX A100 has 1 or 2 TB, 2 x 64 cores and PCIe 4; H100, H200 and B200 have 2 TB, 2 x 56 cores
# and PCIe 5. Of a link's nominal rate (32 and 63 GB/s) 87 % is assumed, of the disks that of one drive.
HOSTS = {"A100-40GB": Host(1000, 128, 27), "A100-80GB": Host(2000, 128, 27)}


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes.

    Attributes:
        node_gbit: nominal Gbit/s of a node's network cards together.
        levels: links from the inside outwards; empty: the GPU's own, and the network cards.
        reserved_gib: of a GPU, for context, NCCL and other processes; None: the planner's own estimate.
        calibration: corrections learnt from runs on such machines.
        reliability: failures and slow nodes, for --simulate.
    """

    kind: str
    card: Gpu
    nodes: int
    gpus_per_node: int
    node_gbit: float
    levels: tuple[Level, ...] = ()
    host: Host = field(default_factory=Host)
    reserved_gib: float | None = None
    calibration: Calibration | None = None
    reliability: Reliability = field(default_factory=Reliability)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def scaled(self, gpus: int) -> Cluster:
        """Return the cluster with as many nodes as `gpus` need; fewer GPUs than a node has make one smaller node."""
        if gpus <= self.gpus_per_node:
            return replace(self, nodes=1, gpus_per_node=gpus)
        if gpus % self.gpus_per_node:
            raise ConfigurationError(f"--gpus {gpus}: nodes have {self.gpus_per_node} GPUs; give a multiple")
        return replace(self, nodes=gpus // self.gpus_per_node)


def built_in(text: str) -> Cluster:
    """Return one node of a kind such as h100x8. Raises ConfigurationError."""
    match = re.fullmatch(r"(\w+?)x(\d+)", text.lower(), re.ASCII)
    if not match or match[1] not in KINDS or not int(match[2]):
        legal = ", ".join(f"{name}x8" for name in KINDS if name != "cpu") + ", or cpux2 (processes)"
        raise ConfigurationError(f"--cluster {text}: expected a cluster file (.yaml) or a kind such as {legal}")
    kind, gbit = KINDS[match[1]]
    # a process on a CPU has Python and its libraries in place of a CUDA context and NCCL
    reserved = PROCESS_GIB if kind == "cpu" else None
    return Cluster(kind, gpu(kind), 1, int(match[2]), gbit, host=HOSTS.get(kind, Host()), reserved_gib=reserved)


def is_file(text: str) -> bool:
    return Path(text).suffix in (".yaml", ".yml")
