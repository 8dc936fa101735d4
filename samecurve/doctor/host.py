"""Facts about one host, gathered without torch, as values that travel between hosts as JSON."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samecurve.distributed import network
from samecurve.distributed.affinity import num_cores, numa_node
from samecurve.specs.environment import version
from samecurve.storage.file_lock import machine
from samecurve.strategy import preflight

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "peft", "safetensors", "numpy")
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # torch's wheels bring NCCL as a package
# what changes how processes connect, how they use memory or what they compute
VARIABLES = (
    "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF",
)  # fmt: skip
LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}
_SMI_FIELDS = "index,name,memory.total,memory.used,driver_version,pci.bus_id"


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU as nvidia-smi shows it. memory_mib and used_mib: of the whole device. numa_node: -1 if unknown."""

    index: int
    name: str
    memory_mib: int
    used_mib: int
    numa_node: int


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes into. free_bytes: on its disk, or on that of its nearest parent that
    exists; 0 if that does not say."""

    purpose: str
    path: str
    exists: bool
    writable: bool
    free_bytes: int
    kind: str


@dataclass(frozen=True)
class HostFacts:
    """Facts about one host, collected on it.

    Attributes:
        machine: identifies machine and network, so that ranks of one host are counted once. A container with its own
            network is a host.
        versions: package to version, "" if it is not installed; also "python", "nccl" and "driver".
        links: the matrix of `nvidia-smi topo -m`, "" without one.
        addresses: address to interface, for interfaces that are up.
        own_address: what the host's own name resolves to, "" if to nothing.
        route: the interface towards the master address, "" if there is no route or no master.
        speeds: interface to Mbit/s, where the driver says it.
        limits: "memlock" and "nofile", soft limits; -1 for unlimited.
        shm_bytes: free bytes in /dev/shm.
        time: seconds since the epoch when the facts were gathered.
    """

    host: str
    machine: str
    versions: dict[str, str]
    gpus: list[InstalledGpu]
    links: str
    cores: int
    numa_nodes: int
    addresses: dict[str, str]
    own_address: str
    route: str
    speeds: dict[str, int]
    variables: dict[str, str]
    limits: dict[str, int]
    shm_bytes: int
    folders: list[Folder]
    time: float

    @classmethod
    def from_json(cls, fields: Mapping) -> HostFacts:
        """The inverse of dataclasses.asdict."""
        gpus, folders = (
            [InstalledGpu(**gpu) for gpu in fields["gpus"]],
            [Folder(**folder) for folder in fields["folders"]],
        )
        return cls(**{**fields, "gpus": gpus, "folders": folders})


def facts(folders: Mapping[str, Path], environ: Mapping[str, str] = os.environ) -> HostFacts:
    """Gather this host's facts.

    Args:
        folders: purpose to path, of what a run writes.
    """
    gpus, driver = [], ""
    shown = _output("nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits")
    for line in shown.splitlines():
        index, name, total, used, driver, bus = (part.strip() for part in line.split(","))
        # [N/A] where GPU and host share one memory
        total, used = (int(text) if text.isdecimal() else 0 for text in (total, used))
        gpus.append(InstalledGpu(int(index), name, total, used, numa_node(bus)))
    namespace = own_address = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    with contextlib.suppress(OSError):
        own_address = socket.gethostbyname(socket.gethostname())
    addresses = network.interfaces()
    speeds = {}
    for name in set(addresses.values()):
        with contextlib.suppress(OSError, ValueError):  # wireless and some virtual interfaces have none
            speeds[name] = int(Path("/sys/class/net", name, "speed").read_text())
    return HostFacts(
        host=socket.gethostname(),
        machine=f"{machine()} {namespace}",
        versions=versions() | {"driver": driver},
        gpus=gpus,
        links=_output("nvidia-smi", "topo", "-m") if gpus else "",
        cores=num_cores(),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        addresses=addresses,
        own_address=own_address,
        route=addresses.get(network.source_address(environ.get("MASTER_ADDR", "")), ""),
        speeds={name: speed for name, speed in speeds.items() if speed > 0},  # -1 where the driver does not know it
        variables={name: environ[name] for name in VARIABLES if name in environ},
        limits={name: resource.getrlimit(number)[0] for name, number in LIMITS.items()},
        shm_bytes=_free_bytes(Path("/dev/shm")),
        folders=[_folder(purpose, path) for purpose, path in folders.items()],
        time=time.time(),
    )


def versions() -> dict[str, str]:
    """Map Python and each package to its version; "" if it is not installed."""
    nccl = next(filter(None, map(version, NCCL_PACKAGES)), "")
    return {"python": platform.python_version(), **{name: version(name) or "" for name in PACKAGES}, "nccl": nccl}


def _output(*command: str) -> str:
    """The output of a command; "" if it is not installed, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _folder(purpose: str, path: Path) -> Folder:
    import psutil

    existing = preflight.existing_parent(path)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    whole = existing.resolve()
    disks = [disk for disk in psutil.disk_partitions(all=True) if whole.is_relative_to(disk.mountpoint)]
    kind = max(disks, key=lambda disk: len(disk.mountpoint)).fstype if disks else ""  # such as nfs4
    return Folder(purpose, str(path), path.exists(), writable, _free_bytes(existing), kind)
