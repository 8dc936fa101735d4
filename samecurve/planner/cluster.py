"""The machines of a plan: a built-in kind such as h100x8, or a cluster file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from samecurve.config.documents import Document, format_problems, read_document
from samecurve.errors import ConfigurationError
from samecurve.planner.hardware import Gpu, gpu, known_gpu, known_names

KINDS = {
    "a100": ("A100-80GB", 1600.0),
    "a100_40gb": ("A100-40GB", 1600.0),
    "h100": ("H100-80GB", 3200.0),
    "h200": ("H200", 3200.0),
    "b200": ("B200", 3200.0),
}
KEYS = ("gpu", "nodes", "gpus_per_node", "gbit_per_s_per_node")


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes. node_gbit: nominal Gbit/s of a node's network cards together."""

    kind: str
    card: Gpu
    nodes: int
    gpus_per_node: int
    node_gbit: float

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


def cluster(text: str) -> Cluster:
    """Read `--cluster`. Raises ConfigurationError."""
    if Path(text).suffix in (".yaml", ".yml"):
        return _from_file(text)
    match = re.fullmatch(r"(\w+?)x(\d+)", text)
    if not match or match[1] not in KINDS or not int(match[2]):
        legal = ", ".join(f"{name}x8" for name in KINDS)
        raise ConfigurationError(f"--cluster {text}: expected a cluster file (.yaml) or a kind such as {legal}")
    kind, gbit = KINDS[match[1]]
    return Cluster(kind, gpu(kind), 1, int(match[2]), gbit)


def _from_file(path: str) -> Cluster:
    document = read_document(path)
    if not document.problems:  # an unreadable file lacks every key
        _check(document)
    if document.problems:
        raise ConfigurationError(format_problems(document.problems))
    given = document.content
    rate = float(given.get("gbit_per_s_per_node") or 0)
    return Cluster(given["gpu"], gpu(given["gpu"]), given["nodes"], given["gpus_per_node"], rate)


def _check(document: Document) -> None:
    for key in document.content:
        if key not in KEYS:
            document.problem((key,), f"unknown key; known are {', '.join(KEYS)}")
    for key in ("nodes", "gpus_per_node"):
        value = document.content.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            document.problem((key,), f"found {value!r}, expected a positive whole number")
    kind = document.content.get("gpu")
    if not isinstance(kind, str) or not known_gpu(kind):
        document.problem(("gpu",), f"found {kind!r}, expected a GPU with known rates: {', '.join(known_names())}")
    rate = document.content.get("gbit_per_s_per_node")
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf):
        document.problem(("gbit_per_s_per_node",), f"found {rate!r}, expected a positive number of Gbit/s")
