"""The machines of a plan: a built-in kind such as h100x8, or a cluster file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from samecurve.config import loader
from samecurve.config.documents import describe, format_problems, read_document
from samecurve.config.section import Count, Name, Section
from samecurve.errors import ConfigurationError
from samecurve.planner.calibration import Calibration
from samecurve.planner.hardware import MEASURED_SHARE, PCIE_5, Gpu, canonical, gpu, known_gpu, known_names
from samecurve.planner.links import DEFAULT_NODE_GBIT, Level, levels_of

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


def node_gbit(card: Gpu) -> float:
    """Return the nominal Gbit/s of a node with these GPUs, where no cluster file gives it."""
    return next((gbit for kind, gbit in KINDS.values() if known_gpu(kind) == card), DEFAULT_NODE_GBIT)


@dataclass(frozen=True)
class Host:
    """A node beside its GPUs: memory, cores, and GB/s between a GPU and host memory, and to a local disk.

    The defaults are a DGX H100's 2 TB and 2 x 56 cores, and the assumed rates of PCIe 5 and of one drive.

    Attributes:
        is_assumed: whether `memory_gib` is, which the cluster file may give.
    """

    memory_gib: float = 2000
    cpu_cores: float = 112
    pcie_gb_per_s: float = PCIE_5
    nvme_gb_per_s: float = 6
    is_assumed: bool = True


# By the DGX A100's data sheet; others have the default's.
HOSTS = {"A100-40": Host(1000, 128), "A100": Host(2000, 128), "cpu": Host(gpu("cpu").memory_gib)}


Rate = Annotated[float, Field(gt=0)]


def _of_ranks(rates: dict[str, float] | None) -> dict[str, float] | None:
    for ranks in rates or ():
        if not ranks.isdecimal() or not int(ranks):
            raise ValueError(f"expected numbers of ranks, such as {{32: 65, 64: 33}}, not {ranks!r}")
    return rates


class LinkBlock(Section):
    """See links.Level; `bus_gb_per_s` is one number, which holds for all groups, or numbers by the ranks of a group."""

    level: Name | None = None
    size: Count | None = None
    bus_gb_per_s: Annotated[
        dict[str, Rate] | None,
        BeforeValidator(lambda value: value if isinstance(value, Mapping | None) else {"1": value}),
        AfterValidator(_of_ranks),
    ] = None
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


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes.

    Attributes:
        file: what a cluster file says about them, also of a built-in kind.
        kind: of GPU; device for one that the file describes.
        card: the GPU; of a CPU, a process's share of the host.
        levels: links from the inside outwards.
        calibration: corrections learnt from runs on such machines.
    """

    file: ClusterFile
    kind: str
    card: Gpu
    host: Host
    levels: tuple[Level, ...]
    calibration: Calibration | None = None

    @property
    def nodes(self) -> int:
        return self.file.nodes

    @property
    def gpus_per_node(self) -> int:
        return self.file.gpus_per_node

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def scaled(self, gpus: int) -> Cluster:
        """Return the cluster with as many nodes as `gpus` need; fewer GPUs than a node has make one smaller node."""
        changed: dict[str, Any] = {"nodes": gpus // self.gpus_per_node}
        if gpus <= self.gpus_per_node:
            near = [block.model_copy(update={"size": gpus}) for block in self.file.links[:1]]
            changed = {"nodes": 1, "gpus_per_node": gpus, "links": [*near, *self.file.links[1:]]}
        elif gpus % self.gpus_per_node:
            raise ConfigurationError(f"--gpus {gpus}: nodes have {self.gpus_per_node} GPUs; give a multiple")
        return replace(describe_machines(self.file.model_copy(update=changed)), calibration=self.calibration)


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
    file = ClusterFile(gpu=kind, nodes=1, gpus_per_node=int(match[2]), gbit_per_s_per_node=gbit)
    return describe_machines(file)


def read_cluster(text: str) -> Cluster:
    """Read `--cluster`: a file, or a built-in kind. Raises ConfigurationError."""
    if Path(text).suffix not in (".yaml", ".yml"):
        return built_in(text)
    document = read_document(text)
    if document.problems:
        raise ConfigurationError(format_problems(document.problems))
    try:
        file = ClusterFile.model_validate(document.content)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=True):
            path = tuple(str(part) for part in detail["loc"])
            document.problem(path, loader.explain(detail, path, ClusterFile))
        raise ConfigurationError(format_problems(document.problems)) from None
    if file.device and file.gpu:
        document.problem(("device",), "conflicts with gpu; keep one of them")
    if not file.device and not (file.gpu and known_gpu(file.gpu)):
        names, observed = ", ".join(known_names()), f"found {describe(file.gpu)}" if file.gpu else "missing"
        fix = "describe another one under device"
        document.problem(("gpu",), f"{observed}, expected a GPU with known rates: {names}; {fix}")
    machines = describe_machines(file)
    memory, sizes = machines.card.memory_gib, [level.size for level in machines.levels[:-1]]
    if file.reserved_gib is not None and file.reserved_gib >= memory:
        least = f"expected less than the memory of the GPU, {memory:g} GiB"
        document.problem(("reserved_gib",), f"found {file.reserved_gib:g}, {least}; the rest is for the job")
    if sizes != sorted(set(sizes)) or sizes[0] != file.gpus_per_node:
        legal = f"expected the first to be gpus_per_node ({file.gpus_per_node}) and each to be larger"
        document.problem(("links",), f"found sizes {sizes}, {legal}")
    if document.problems:
        raise ConfigurationError(format_problems(document.problems))
    return machines


def describe_machines(file: ClusterFile) -> Cluster:
    """Fill in what the data sheet of the GPU says; that of an A100 stands for one that is not known."""
    kind = "device" if file.device else file.gpu or ""
    card = known_gpu(kind) or gpu("A100-80GB")
    given = {name: value for name, value in file.host if value is not None}
    usual = {"pcie_gb_per_s": PCIE_5 if file.device else card.pcie_gb_per_s, "is_assumed": "memory_gib" not in given}
    host = replace(HOSTS.get(canonical(kind), Host()), **usual | given)
    if file.device:
        # without `links`, the GPUs of a node communicate over PCIe: no NVLink is known
        peaks, memory, hbm = file.device.peak_tflops, file.device.memory_gib, file.device.hbm_gb_per_s
        bf16, fp8, fp32 = (MEASURED_SHARE * peak for peak in (peaks.bf16, peaks.fp8, peaks.fp32))
        card = Gpu(bf16, fp8, hbm, host.pcie_gb_per_s, memory, "other", fp32)
    if card.generation == "cpu":
        card = replace(card, memory_gib=host.memory_gib / file.gpus_per_node)
    own = levels_of(card, file.gpus_per_node, file.gbit_per_s_per_node)
    levels = []
    for index, block in enumerate(file.links):  # what one leaves out is the GPU's own link, or the cards' nominal rate
        measured = tuple(sorted((int(ranks), rate) for ranks, rate in (block.bus_gb_per_s or {}).items()))
        gbit = block.gbit_per_s_per_node or (file.gbit_per_s_per_node if index else 0)
        if not index and not measured:
            measured = ((1, gbit / 8 if gbit else card.bus_gb_per_s),)
        name = block.level or ("network" if index else "node")
        size = block.size or (0 if index else file.gpus_per_node)
        levels.append(Level(name, size, measured, gbit, block.latency_us))
    levels = levels or own[:1]
    return Cluster(file, kind, card, host, (*levels, *(own[1:] if len(levels) == 1 else ())))


def cluster_text(machines: Cluster) -> str:
    """Format a cluster file that describes these machines."""
    return yaml.safe_dump(machines.file.model_dump(exclude_defaults=True), sort_keys=False)
