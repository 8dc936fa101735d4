"""The machines of a plan: a built-in kind such as h100x8, or a cluster file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from samecurve.config import loader
from samecurve.config.documents import Document, describe, format_problems, read_document
from samecurve.config.section import Count, Name, Section
from samecurve.errors import ConfigurationError
from samecurve.planner.calibration import Calibration
from samecurve.planner.hardware import MEASURED_SHARE, Gpu, gpu, known_gpu, known_names
from samecurve.planner.links import DEFAULT_NODE_GBIT, Level

# Kind of GPU and nominal Gbit/s of a node's network cards: of a DGX A100, of DGX H100, H200 and B200, and of Azure's
# ND MI300X v5; of a CPU, one card of a server, where each process is one device.
KINDS = {
    "a100": ("A100-80GB", 1600.0),
    "a100_40gb": ("A100-40GB", 1600.0),
    "h100": ("H100-80GB", 3200.0),
    "h200": ("H200", 3200.0),
    "b200": ("B200", 3200.0),
    "mi300x": ("MI300X", 3200.0),
    "cpu": ("cpu", 100.0),
}


@dataclass(frozen=True)
class Host:
    """A node beside its GPUs: memory, cores, and GB/s between a GPU and host memory, and to a local disk.

    The defaults are a DGX H100's 2 TB and 2 x 56 cores, and assumed rates: 87 % of PCIe 5's nominal 63, and one drive.
    """

    memory_gib: float = 2000
    cpu_cores: float = 112
    pcie_gb_per_s: float = 55
    nvme_gb_per_s: float = 6


# By the DGX A100's data sheet; 87 % of PCIe 4's nominal 32 GB/s are assumed.
HOSTS = {"A100-40GB": Host(1000, 128, 27), "A100-80GB": Host(2000, 128, 27), "cpu": Host(gpu("cpu").memory_gib)}


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
            return replace(self, nodes=1, gpus_per_node=gpus, card=_shared(self.card, self.host, gpus))
        if gpus % self.gpus_per_node:
            raise ConfigurationError(f"--gpus {gpus}: nodes have {self.gpus_per_node} GPUs; give a multiple")
        return replace(self, nodes=gpus // self.gpus_per_node)


def _shared(card: Gpu, host: Host, processes: int) -> Gpu:
    """Give each process on a CPU its share of the host's memory; a GPU has its own."""
    return replace(card, memory_gib=host.memory_gib / processes) if card.generation == "cpu" else card


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
    count, host = int(match[2]), HOSTS.get(kind, Host())
    return Cluster(kind, _shared(gpu(kind), host, count), 1, count, gbit, host=host)


# The schema of a cluster file.

Rate = Annotated[float, Field(gt=0)]


def _of_all_ranks(value: Any) -> Any:
    """One number holds for groups of any size."""
    return value if isinstance(value, Mapping) or value is None else {"1": value}


def _of_ranks(rates: dict[str, float] | None) -> dict[str, float] | None:
    for ranks in rates or ():
        if not ranks.isdecimal() or not int(ranks):
            raise ValueError(f"expected numbers of ranks, such as {{32: 65, 64: 33}}, not {ranks!r}")
    return rates


class LinkBlock(Section):
    """See links.Level; `bus_gb_per_s` is one number, or numbers by the ranks of a group."""

    level: Name | None = None
    size: Count | None = None
    bus_gb_per_s: Annotated[dict[str, Rate] | None, BeforeValidator(_of_all_ranks), AfterValidator(_of_ranks)] = None
    gbit_per_s_per_node: Rate | None = None
    latency_us: Rate = 0


class Peaks(Section):
    """TFLOP/s of the data sheet; products reach MEASURED_SHARE of them."""

    bf16: Rate
    fp8: Rate = 0
    fp32: Rate = 0


class Device(Section):
    memory_gib: Rate
    peak_tflops: Peaks
    hbm_gb_per_s: Rate


class HostBlock(Section):
    memory_gib: Rate | None = None
    cpu_cores: Rate | None = None
    pcie_gb_per_s: Rate | None = None
    nvme_gb_per_s: Rate | None = None


class ClusterFile(Section):
    gpu: Name | None = None
    device: Device | None = None
    nodes: Count
    gpus_per_node: Count
    links: list[LinkBlock] = []
    host: HostBlock = HostBlock()
    reserved_gib: Annotated[float, Field(ge=0)] | None = None
    gbit_per_s_per_node: Rate = DEFAULT_NODE_GBIT


def read_cluster(text: str) -> Cluster:
    """Read `--cluster`: a file, or a built-in kind. Raises ConfigurationError."""
    if Path(text).suffix not in (".yaml", ".yml"):
        return built_in(text)
    document = read_document(text)
    cluster = None
    if not document.problems:
        try:
            cluster = _cluster(ClusterFile.model_validate(document.content), document)
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=True):
                path = tuple(str(part) for part in detail["loc"])
                document.problem(path, loader.explain(detail, path, ClusterFile))
    if document.problems or not cluster:
        raise ConfigurationError(format_problems(document.problems))
    return cluster


def _cluster(file: ClusterFile, document: Document) -> Cluster:
    """Describe the machines of a file; what contradicts itself becomes a problem of the document."""
    kind = "device" if file.device else file.gpu or ""
    given = {name: value for name, value in file.host if value is not None}
    host = replace(HOSTS.get(kind, Host()), **given)
    if file.device:
        # without `links`, the GPUs of a node communicate over PCIe: no NVLink is known
        peaks, memory, hbm = file.device.peak_tflops, file.device.memory_gib, file.device.hbm_gb_per_s
        bf16, fp8, fp32 = (MEASURED_SHARE * peak for peak in (peaks.bf16, peaks.fp8, peaks.fp32))
        card = Gpu(bf16, fp8, hbm, host.pcie_gb_per_s, memory, "other", fp32)
        if file.gpu:
            document.problem(("device",), "conflicts with gpu; keep one of them")
    else:
        known = known_gpu(kind) if kind else None
        if not known:
            names, observed = ", ".join(known_names()), f"found {describe(kind)}" if kind else "missing"
            text = f"{observed}, expected a GPU with known rates: {names}; describe another one under device"
            document.problem(("gpu",), text)
        card = _shared(known or gpu("A100-80GB"), host, file.gpus_per_node)
    if file.reserved_gib is not None and file.reserved_gib >= card.memory_gib:
        text = f"found {file.reserved_gib:g}, expected less than the memory of the GPU, {card.memory_gib:g} GiB"
        document.problem(("reserved_gib",), f"{text}; the rest is for the job")
    levels = [_level(block, index, file, card) for index, block in enumerate(file.links)]
    levels = levels or [Level("node", file.gpus_per_node, ((1, card.bus_gb_per_s),))]
    if len(levels) == 1:
        levels.append(Level("network", 0, node_gbit=file.gbit_per_s_per_node))
    sizes = [level.size for level in levels[:-1]]
    if sizes != sorted(set(sizes)) or sizes[0] != file.gpus_per_node:
        text = f"found sizes {sizes}, expected the first to be gpus_per_node ({file.gpus_per_node})"
        document.problem(("links",), f"{text} and each to be larger")
    slowest = min((level.node_gbit for level in levels[1:] if level.node_gbit), default=file.gbit_per_s_per_node)
    return Cluster(
        kind, card, file.nodes, file.gpus_per_node, slowest, tuple(levels), host, file.reserved_gib
    )  # fmt: skip


def _level(block: LinkBlock, index: int, file: ClusterFile, card: Gpu) -> Level:
    """Return a level; what it leaves out is the GPU's own link, or the network cards' nominal rate."""
    measured = tuple(sorted((int(ranks), rate) for ranks, rate in (block.bus_gb_per_s or {}).items()))
    gbit = block.gbit_per_s_per_node or (file.gbit_per_s_per_node if index else 0)
    if not index and not measured:
        measured = ((1, gbit / 8 if gbit else card.bus_gb_per_s),)
    name, size = block.level or ("network" if index else "node"), block.size or (0 if index else file.gpus_per_node)
    return Level(name, size, measured, gbit, block.latency_us)


def cluster_text(machines: Cluster) -> str:
    """Format a cluster file that describes these machines."""
    card = machines.card
    content: dict[str, Any] = {"gpu": machines.kind}
    if machines.kind == "device":
        peaks = {"bf16": card.matmul_tflops, "fp8": card.fp8_tflops, "fp32": card.fp32_tflops}
        device: dict[str, Any] = {"memory_gib": card.memory_gib, "hbm_gb_per_s": card.hbm_gb_per_s}
        device["peak_tflops"] = {key: value / MEASURED_SHARE for key, value in peaks.items() if value}
        content = {"device": device}
    content |= {"nodes": machines.nodes, "gpus_per_node": machines.gpus_per_node}
    content |= {"gbit_per_s_per_node": machines.node_gbit, "host": vars(machines.host)}
    content |= {"links": [_link_content(level) for level in machines.levels]} if machines.levels else {}
    if machines.levels:  # `Cluster.scaled` may have shrunk the node, whose size the first level must have
        content["links"][0]["size"] = machines.gpus_per_node
    content |= {"reserved_gib": machines.reserved_gib} if machines.reserved_gib is not None else {}
    return yaml.safe_dump(_plain(content), sort_keys=False)


def _link_content(level: Level) -> dict[str, Any]:
    rates = dict(level.measured)
    content = {
        "level": level.name,
        "size": level.size,
        "bus_gb_per_s": rates[1] if rates.keys() == {1} else rates,
        "gbit_per_s_per_node": level.node_gbit,
        "latency_us": level.latency_us,
    }
    return {key: value for key, value in content.items() if value}


def _plain(value: Any) -> Any:
    """Return numbers as YAML shows them best: whole where they are, without errors of rounding."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.12g}")
    return int(rounded) if rounded.is_integer() else rounded
