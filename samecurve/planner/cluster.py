"""The machines of a plan: a built-in kind such as h100x8, or a cluster file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from samecurve.config.documents import Document, KeyPath, describe, format_problems, read_document, suggest
from samecurve.errors import ConfigurationError
from samecurve.planner.calibration import Calibration
from samecurve.planner.hardware import (
    ASSUMED,
    CPU,
    DATA_SHEET,
    FILE,
    MEASURED_SHARE,
    PROCESS_GIB,
    Constant,
    Gpu,
    gpu,
    known_gpu,
    known_names,
    plain,
)
from samecurve.planner.links import DEFAULT_NODE_GBIT, Level

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


# Reads and writes cluster files. Every unknown key is a problem with its file and line.


KEYS = ("gpu", "device", "nodes", "gpus_per_node", "links", "host", "reserved_gib", "gbit_per_s_per_node")
DEVICE = ("memory_gib", "peak_tflops", "hbm_gb_per_s")
PEAKS = ("bf16", "fp8", "fp32")
LINK = ("level", "size", "bus_gb_per_s", "gbit_per_s_per_node", "latency_us")
HOST = tuple(key.name for key in fields(Host))
UNITS = {
    "_gib": "GiB", "tflops": "TFLOP/s", "gb_per_s": "GB/s", "gb_per_s_per_node": "GB/s of a node",
    "gbit_per_s_per_node": "Gbit/s of a node", "_us": "us",
}  # fmt: skip


def read_cluster(text: str) -> Cluster:
    """Read `--cluster`: a file, or a built-in kind. Raises ConfigurationError."""
    if not is_file(text):
        return built_in(text)
    document = read_document(text)
    cluster = None if document.problems else _Reader(document).cluster()
    if document.problems or cluster is None:
        raise ConfigurationError(format_problems(document.problems))
    return cluster


class _Reader:
    """Reads the keys of one file; what is wrong becomes a problem of the document."""

    def __init__(self, document: Document):
        self.document = document

    def cluster(self) -> Cluster:
        self._known((), KEYS)
        nodes, per_node = (int(self._number((key,), 1, whole=True)) for key in ("nodes", "gpus_per_node"))
        kind, card = self._card()
        nominal = self._number(("gbit_per_s_per_node",), DEFAULT_NODE_GBIT, optional=True)
        levels = self._levels(card, per_node, nominal)
        own = HOSTS.get(kind, Host())
        self._known(("host",), HOST)
        host = Host(**{key: self._number(("host", key), getattr(own, key), optional=True) for key in HOST})
        card = shared(card, host, per_node)
        reserved = default_reserved(kind)
        if "reserved_gib" in self.document.content:
            reserved = self._number(("reserved_gib",), 0, least=0)
            if reserved >= card.memory_gib:
                text = f"found {reserved:g}, expected less than the memory of the GPU, {card.memory_gib:g} GiB"
                self.document.problem(("reserved_gib",), f"{text}; the rest is for the job")
        outer = [level.node_gbit for level in levels[1:] if level.node_gbit]
        return Cluster(kind, card, nodes, per_node, min(outer, default=nominal), tuple(levels), host, reserved)

    def _block(self, path: KeyPath) -> Any:
        value: Any = self.document.content
        for key in path:
            value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, dict) else None
        return value

    def _known(self, path: KeyPath, legal: Iterable[str]) -> None:
        block = self._block(path)
        if block is None:
            return
        if not isinstance(block, dict):
            self.document.problem(path, f"found {describe(block)}, expected a block of keys")
            return
        for key in block.keys() - set(legal):
            self.document.problem(
                (*path, key), "unknown key" + suggest((*path, key), ((*path, name) for name in legal))
            )

    def _number(
        self, path: KeyPath, default: float, optional: bool = False, whole: bool = False, least: float = 1e-9
    ) -> float:
        value = self._block(path)
        if value is None and optional:
            return default
        kinds_ = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds_) or not least <= value < math.inf:
            expected = "a positive whole number" if whole else "a positive number"
            observed = "missing" if value is None else f"found {describe(value)}"
            self.document.problem(path, f"{observed}, expected {expected}")
            return default
        return Constant(value, _unit(path), FILE, str(self.document.place(path)))

    def _derived(self, value: float, base: float, text: str) -> Constant:
        """Give a value the origin of the number that it was computed from; that of a peak is assumed."""
        assert isinstance(base, Constant)
        is_peak = base.unit == UNITS["tflops"]
        unit, origin = (base.unit, ASSUMED) if is_peak else (UNITS["gb_per_s"], base.origin)
        return Constant(value, unit, origin, f"{base.source}, {text}")

    def _card(self) -> tuple[str, Gpu]:
        name, device = self.document.get("gpu"), self.document.get("device")
        if device is not None:
            if name is not None:
                self.document.problem(("device",), "conflicts with gpu; keep one of them")
            return "device", self._device()
        card = known_gpu(name) if isinstance(name, str) else None
        if not card:
            observed = "missing" if name is None else f"found {describe(name)}"
            known = ", ".join(known_names())
            text = f"{observed}, expected a GPU with known rates: {known}; describe another one under device"
            self.document.problem(("gpu",), text)
            # any card, so that the other keys are checked in the same report
            return "", gpu("A100-80GB")
        return name, card

    def _device(self) -> Gpu:
        self._known(("device",), DEVICE)
        self._known(("device", "peak_tflops"), PEAKS)

        def peak(kind: str, optional: bool = True) -> float:
            # the file has the data sheet's peak, `Gpu` what products reach
            rated = self._number(("device", "peak_tflops", kind), 0, optional)
            return rated and self._derived(MEASURED_SHARE * rated, rated, f"{MEASURED_SHARE:g} (assumed) of the peak")

        memory, hbm = (self._number(("device", key), 1) for key in ("memory_gib", "hbm_gb_per_s"))
        # no NVLink is known: without `links`, the GPUs of a node communicate over PCIe
        bus = self._number(("host", "pcie_gb_per_s"), Host().pcie_gb_per_s, optional=True)
        return Gpu(peak("bf16", optional=False), peak("fp8"), hbm, bus, memory, "other", peak("fp32"))

    def _levels(self, card: Gpu, per_node: int, nominal: float) -> list[Level]:
        """Read the levels; what a level leaves out is the GPU's own link, or the network cards' nominal rate."""
        given = self.document.content.get("links", [])
        if not isinstance(given, list):
            self.document.problem(("links",), f"found {describe(given)}, expected a list of levels, innermost first")
            given = []
        levels = [self._level(("links", str(index)), index, card, per_node, nominal) for index in range(len(given))]
        if not levels:
            levels = [Level("node", per_node, ((1, card.bus_gb_per_s),))]
        if len(levels) == 1:
            levels.append(Level("network", 0, node_gbit=nominal))
        sizes = [level.size for level in levels[:-1]]
        if sizes != sorted(set(sizes)) or sizes[0] != per_node:
            text = f"found sizes {sizes}, expected the first to be gpus_per_node ({per_node}) and each to be larger"
            self.document.problem(("links",), text)
        return levels

    def _level(self, path: KeyPath, index: int, card: Gpu, per_node: int, nominal: float) -> Level:
        self._known(path, LINK)
        block = self._block(path)
        if not isinstance(block, dict):
            return Level("node", per_node)  # `_known` has reported it
        size = int(self._number((*path, "size"), 0 if index else per_node, optional=True, whole=True))
        measured = self._measured((*path, "bus_gb_per_s"))
        gbit = self._number((*path, "gbit_per_s_per_node"), nominal if index else 0, optional=True)
        if not index and not measured:
            measured = (
                ((1, self._derived(gbit / 8, gbit, "an eighth of Gbit/s")),) if gbit else ((1, card.bus_gb_per_s),)
            )
        latency = self._number((*path, "latency_us"), 0, optional=True)
        return Level(str(block.get("level", "network" if index else "node")), size, measured, gbit, latency)

    def _measured(self, path: KeyPath) -> tuple[tuple[int, float], ...]:
        value = self._block(path)
        if not isinstance(value, dict):
            return ((1, self._number(path, 1)),) if value is not None else ()
        ranks = [key for key in value if str(key).isdigit() and int(key) > 0]
        for key in value.keys() - set(ranks):
            self.document.problem((*path, str(key)), "expected a number of ranks, such as {32: 65, 64: 33}")
        return tuple(sorted((int(key), self._number((*path, key), 1)) for key in ranks))


def _unit(path: KeyPath) -> str:
    """Find the unit in the key, or in that of its block."""
    named = [UNITS[end] for key in reversed(path) for end in UNITS if key.endswith(end)]
    return named[0] if named else path[-1].replace("_", " ")


def cluster_text(machines: Cluster) -> str:
    """Format a cluster file that describes these machines."""
    content: dict[str, Any] = {"gpu": machines.kind}
    if machines.kind == "device":
        # the inverse of `_device`: a file has peaks of the data sheet
        peaks = {
            "bf16": machines.card.matmul_tflops,
            "fp8": machines.card.fp8_tflops,
            "fp32": machines.card.fp32_tflops,
        }
        content = {
            "device": {
                "memory_gib": plain(machines.card.memory_gib),
                "peak_tflops": {key: plain(value / MEASURED_SHARE) for key, value in peaks.items() if value},
                "hbm_gb_per_s": plain(machines.card.hbm_gb_per_s),
            }
        }
    content |= {"nodes": machines.nodes, "gpus_per_node": machines.gpus_per_node}
    content["gbit_per_s_per_node"] = plain(machines.node_gbit)
    if machines.levels:
        content["links"] = [_level_content(level) for level in machines.levels]
        # `Cluster.scaled` may have shrunk the node, whose size the first level must have
        content["links"][0]["size"] = machines.gpus_per_node
    content["host"] = {key: plain(getattr(machines.host, key)) for key in HOST}
    if machines.reserved_gib is not None and machines.reserved_gib is not default_reserved(machines.kind):
        content["reserved_gib"] = plain(machines.reserved_gib)
    return yaml.safe_dump(content, sort_keys=False)


def _level_content(level: Level) -> dict[str, Any]:
    content: dict[str, Any] = {"level": level.name}
    if level.size:
        content["size"] = level.size
    if level.measured:
        single = len(level.measured) == 1 and level.measured[0][0] == 1
        rates = {ranks: plain(rate) for ranks, rate in level.measured}
        content["bus_gb_per_s"] = rates[1] if single else rates
    if level.node_gbit:
        content["gbit_per_s_per_node"] = plain(level.node_gbit)
    if level.latency_us:
        content["latency_us"] = plain(level.latency_us)
    return content
