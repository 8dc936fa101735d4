"""The machines of a plan: a built-in kind such as h100x8, or a cluster file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.planner.calibration import Calibration
from samecurve.planner.cards import CPU, Gpu
from samecurve.planner.constants import ASSUMED, DATA_SHEET, Constant
from samecurve.planner.hardware import DEFAULT_NODE_GBIT, PROCESS_GIB, gpu, known_gpu, known_names
from samecurve.planner.links import Level

_DGX_A100, _DGX_H100 = "DGX A100", "DGX H100, H200 and B200"
_CARDS_A100 = Constant(1600, "Gbit/s of a node", DATA_SHEET, f"network cards of a {_DGX_A100}")
_CARDS_H100 = Constant(3200, "Gbit/s of a node", DATA_SHEET, f"network cards of {_DGX_H100}")
# Kind of GPU and nominal rate of a node's network cards.
KINDS = {
    "a100": ("A100-80GB", _CARDS_A100),
    "a100_40gb": ("A100-40GB", _CARDS_A100),
    "h100": ("H100-80GB", _CARDS_H100),
    "h200": ("H200", _CARDS_H100),
    "b200": ("B200", _CARDS_H100),
    "mi300x": ("MI300X", Constant(3200, "Gbit/s of a node", ASSUMED, "8 cards of 400, as of Azure's ND MI300X v5")),
    # each process is one device; see CPU in cards.py
    "cpu": ("cpu", Constant(100, "Gbit/s of a host", ASSUMED, "one network card of a server")),
}


@dataclass(frozen=True)
class Host:
    """A node beside its GPUs: memory, cores, and GB/s between a GPU and host memory, and to a local disk."""

    memory_gib: float = Constant(2000, "GiB", DATA_SHEET, f"2 TB of {_DGX_H100}")
    cpu_cores: float = Constant(112, "cores", DATA_SHEET, f"2 x 56 of {_DGX_H100}")
    pcie_gb_per_s: float = Constant(55, "GB/s of a GPU", ASSUMED, "87 % of PCIe 5's nominal 63")
    nvme_gb_per_s: float = Constant(6, "GB/s of a node", ASSUMED, "one drive")


_LANES_A100 = Constant(27, "GB/s of a GPU", ASSUMED, "87 % of PCIe 4's nominal 32")
_CORES_A100 = Constant(128, "cores", DATA_SHEET, f"2 x 64 of a {_DGX_A100}")
HOSTS = {
    "A100-40GB": Host(Constant(1000, "GiB", DATA_SHEET, f"1 TB of a {_DGX_A100}"), _CORES_A100, _LANES_A100),
    "A100-80GB": Host(Constant(2000, "GiB", DATA_SHEET, f"2 TB of a {_DGX_A100}"), _CORES_A100, _LANES_A100),
    "cpu": Host(CPU.memory_gib),
}


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes.

    Attributes:
        node_gbit: nominal Gbit/s of a node's network cards together.
        levels: links from the inside outwards; empty: the GPU's own, and the network cards.
        reserved_gib: of a GPU, for context, NCCL and other processes; None: measured, or the planner's own estimate.
        calibration: corrections learnt from runs on such machines.
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

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def scaled(self, gpus: int) -> Cluster:
        """Return the cluster with as many nodes as `gpus` need; fewer GPUs than a node has make one smaller node."""
        if gpus <= self.gpus_per_node:
            return replace(self, nodes=1, gpus_per_node=gpus, card=shared(self.card, self.host, gpus))
        if gpus % self.gpus_per_node:
            raise ConfigurationError(f"--gpus {gpus}: nodes have {self.gpus_per_node} GPUs; give a multiple")
        return replace(self, nodes=gpus // self.gpus_per_node)


def shared(card: Gpu, host: Host, processes: int) -> Gpu:
    """Give each process on a CPU its share of the host's memory; a GPU has its own."""
    whole = host.memory_gib
    if card.generation != "cpu":
        return card
    assert isinstance(whole, Constant)
    source = whole.source if processes == 1 else f"{whole.source}; shared by {processes} processes"
    return replace(card, memory_gib=Constant(whole / processes, whole.unit, whole.origin, source))


def built_in(text: str) -> Cluster:
    """Return one node of a kind such as h100x8, or of any GPU with known rates. Raises ConfigurationError."""
    match = re.fullmatch(r"([\w-]+?)x(\d+)", text.lower(), re.ASCII)
    if not match or not (match[1] in KINDS or known_gpu(match[1])) or not int(match[2]):
        usual = ", ".join(f"{name}x8" for name in KINDS if name != "cpu") + ", or cpux2 (processes)"
        others = ", ".join(known_names())
        raise ConfigurationError(
            f"--cluster {text}: expected a cluster file (.yaml, see Cluster files in docs/planning.md) or a kind "
            f"of GPU and the number in a node, such as {usual}; kinds with known rates: {others}"
        )
    kind, gbit = KINDS.get(match[1], (match[1].upper(), DEFAULT_NODE_GBIT))
    count, host, reserved = int(match[2]), HOSTS.get(kind, Host()), default_reserved(kind)
    return Cluster(kind, shared(gpu(kind), host, count), 1, count, gbit, host=host, reserved_gib=reserved)


def default_reserved(kind: str) -> Constant | None:
    """Return `reserved_gib` of machines for which none is given.

    A process on a CPU has Python and its libraries in place of a CUDA context and NCCL.
    """
    return PROCESS_GIB if kind == "cpu" else None


def is_file(text: str) -> bool:
    return Path(text).suffix in (".yaml", ".yml")
