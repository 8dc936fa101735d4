"""Judges one host: can it run this recipe under this strategy? And compares the hosts of one run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.checkpoint.commit import SPARE_BYTES
from samecurve.doctor.findings import Finding, failed
from samecurve.doctor.host import Folder, HostFacts
from samecurve.errors import ConfigurationError, StorageError, TopologyError
from samecurve.specs.environment import INSTALL
from samecurve.storage.cache import cache_folder
from samecurve.storage.terminal import aligned
from samecurve.strategy import preflight

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.strategy.plan import Strategy

REQUIRED = ("torch", "accelerate", "transformers", "datasets")
FEW_OPEN_FILES = 4096  # a loader worker and a rank keep hundreds open; many systems start with 1,024
LITTLE_SHARED_MEMORY = 1 << 30  # loader workers and NCCL pass data through /dev/shm; a container's default is 64 MB
SMALL_MEMLOCK = 1 << 20  # InfiniBand and DeepSpeed's NVMe library lock pages; the usual 8 MB do for tests only

LINK_LOCAL = ("fe80:", "169.254.")


def folders(recipe: Recipe | None, strategy: Strategy | None) -> dict[str, Path]:
    """Map the purpose of each folder that a run writes into to its path."""
    paths = {"cache": cache_folder(recipe.data.cache_dir if recipe else None)}
    if recipe:
        paths["output_dir"] = Path(recipe.output_dir)
    for path in sorted(set(strategy.nvme_paths)) if strategy else ():
        paths["nvme_path"] = path
    return paths


def check_host(
    facts: HostFacts, needed_bytes: Mapping[str, tuple[int, int]], recipe: Recipe | None, strategy: Strategy | None
) -> Iterator[Finding]:
    """Yield all findings about the host that this process runs on.

    Args:
        needed_bytes: purpose of a folder to the bytes that the run will write there, at least and at most.
    """
    packages = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if version)
    if missing := [name for name in REQUIRED if not facts.versions[name]]:
        problem = f"not installed: {', '.join(missing)}"
        yield failed("packages", packages, problem, INSTALL, ConfigurationError, facts.host)
    else:
        yield Finding("packages", packages, host=facts.host)
    yield from _gpus(facts)
    yield from _tools(facts.host, recipe, strategy)
    yield from _limits(facts)
    yield from _own_name(facts)
    for folder in facts.folders:
        yield _storage(facts.host, folder, *needed_bytes.get(folder.purpose, (0, 0)))


def _storage(host: str, folder: Folder, least: int, most: int) -> Finding:
    """Judge the free space as a run does before its first step, see training/room.py."""
    free = f"{folder.free_bytes / 1e9:.1f} GB free" if folder.free_bytes else "free space unknown"
    seen = f"{folder.purpose} {folder.path}: {free}{f', {folder.kind}' if folder.kind else ''}"
    seen += f"; the run needs about {most / 1e9:.2f} GB" if most else ""
    if not folder.writable:
        fix = f"chown it to this user, or set {folder.purpose} to another folder"
        return failed("storage", seen, "this user cannot write there", fix, StorageError, host)
    usable = max(folder.free_bytes - SPARE_BYTES, 0)
    if not folder.free_bytes or usable >= most:
        return Finding("storage", seen, host=host)
    fix = f"free some space, or set {folder.purpose} to a folder on a larger disk"
    if usable < least:
        return failed("storage", seen, "too little free space", fix, StorageError, host)
    return Finding("storage", seen, "too little free space for all checkpoints that are kept", fix, host=host)


def _gpus(facts: HostFacts) -> Iterator[Finding]:
    if not facts.gpus:
        yield Finding(
            "gpus",
            f"none; {facts.cores} cores on {facts.numa_nodes} NUMA node{'s' * (facts.numa_nodes != 1)}",
            host=facts.host,
        )
        return
    kinds = sorted({gpu.name for gpu in facts.gpus})
    memory = min(gpu.memory_mib for gpu in facts.gpus) / 1024
    nodes = sorted({gpu.numa_node for gpu in facts.gpus})
    size = f"{memory:.0f} GiB" if memory else "memory unknown"
    seen = f"{len(facts.gpus)} x {', '.join(kinds)}, {size}, on NUMA nodes {nodes}; {facts.cores} cores"
    seen += f"\n{facts.links.rstrip()}" if facts.links else ""
    used = [gpu for gpu in facts.gpus if gpu.used_mib > 0.05 * gpu.memory_mib]
    problems = []
    if used:
        busy = ", ".join(f"GPU {gpu.index} ({gpu.used_mib:,} MiB)" for gpu in used)
        problems.append(
            (f"memory is in use before the run: {busy}", "nvidia-smi shows the processes; end those that are yours")
        )
    if len(kinds) > 1:
        fix = "choose GPUs of one kind with CUDA_VISIBLE_DEVICES"
        problems.append(("the slowest kind sets the pace of every step", fix))
    yield from _each("gpus", seen, problems, facts.host)
    if facts.variables.get("CUDA_MODULE_LOADING", "LAZY").upper() == "EAGER":
        problem = "every process loads all kernels at its start: seconds, and hundreds of MB of GPU memory"
        yield Finding("gpus", "CUDA_MODULE_LOADING=EAGER", problem, "unset CUDA_MODULE_LOADING", host=facts.host)


def _tools(host: str, recipe: Recipe | None, strategy: Strategy | None) -> Iterator[Finding]:
    """Compilers and operators, by the checks that a run begins with."""
    problems = []
    if strategy and recipe:
        preflight.prepare_environment()  # ninja is looked for where a run would find it
        problems += preflight.environment_problems(strategy, recipe.precision)
    if recipe:
        problems += preflight.compiler_problems(recipe, preflight.has_accelerator())
    for problem in problems:
        yield failed("compilers", "", problem, "", ConfigurationError, host)
    if recipe and not problems:
        needed = ", ".join(sorted(preflight.operators(strategy))) if strategy else ""
        yield Finding("compilers", f"all there; DeepSpeed compiles {needed}" if needed else "all there", host=host)


def _limits(facts: HostFacts) -> Iterator[Finding]:
    unlimited = {name: "unlimited" if value < 0 else f"{value:,}" for name, value in facts.limits.items()}
    shown = ", ".join(f"{name} {value}" for name, value in unlimited.items())
    seen = f"{shown}, /dev/shm {facts.shm_bytes / 1e9:.1f} GB free"
    problems = []
    if 0 <= facts.limits.get("nofile", -1) < FEW_OPEN_FILES:
        problems.append((f"fewer than {FEW_OPEN_FILES:,} open files", "run ulimit -n 65536"))
    if 0 <= facts.limits.get("memlock", -1) < SMALL_MEMLOCK:
        problems.append(("too little memory may be locked", "run ulimit -l unlimited"))
    if facts.shm_bytes < LITTLE_SHARED_MEMORY:
        problems.append(("too little shared memory", "start the container with --shm-size=16g or --ipc=host"))
    yield from _each("limits", seen, problems, facts.host)


def _each(area: str, seen: str, problems: Sequence[tuple[str, str]], host: str) -> Iterator[Finding]:
    """A finding for each problem, with what mends it; without problems one that says what was seen."""
    for problem, fix in problems or [("", "")]:
        yield Finding(area, seen, problem, fix, host=host)


def _own_name(facts: HostFacts) -> Iterator[Finding]:
    shown = [f"{name} {address}" for address, name in facts.addresses.items() if not address.startswith(LINK_LOCAL)]
    interfaces = ", ".join(shown) or "no interface is up"
    seen = f"{facts.host} resolves to {facts.own_address or 'nothing'}; {interfaces}"
    seen += f"; the master is reached over {facts.route}" if facts.route else ""
    chosen = facts.variables.get("GLOO_SOCKET_IFNAME", "")
    unknown = [name for name in chosen.split(",") if name and name not in facts.addresses.values()]
    if unknown:
        problem = f"GLOO_SOCKET_IFNAME={chosen}, but no interface {unknown[0]} is up"
        names = ", ".join(sorted(set(facts.addresses.values())))
        yield failed("network", seen, problem, f"unset it, or export one of {names}", ConfigurationError, facts.host)
    elif facts.route and chosen and facts.route not in chosen.split(","):
        problem = f"GLOO_SOCKET_IFNAME={chosen} is not the interface towards the master ({facts.route})"
        yield Finding(
            "network", seen, problem, f"unset it, or export GLOO_SOCKET_IFNAME={facts.route}", host=facts.host
        )
    else:
        yield Finding("network", seen, host=facts.host)


# Another version may compute or send something else: the run would stop in a collective, or lose the same curve.
MUST_AGREE = ("python", "torch", "accelerate", "deepspeed", "transformers", "nccl", "driver")
# The first of several failed ranks is found by their hosts' clocks (run/liveness.py), and the age of another host's
# file by the own clock (run/status.py).
CLOCK_SECONDS = 2.0
SLOW_PAIR = 0.5  # of the median of all pairs
SLOW_LINK = 0.25  # of what the interface promises; one stream of gloo does not fill a fast one


def compare(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yield the findings from a comparison of two or more hosts."""
    different = [name for name in MUST_AGREE if len({facts.versions.get(name, "") for facts in hosts}) > 1]
    if different:
        rows = [[facts.host, *(facts.versions.get(name) or "-" for name in different)] for facts in hosts]
        fix = "pip install -r requirements.txt -c constraints.txt on each"
        if different == ["driver"]:
            fix = "install one driver on all hosts"
        problem = f"{', '.join(different)} differ between hosts"
        yield failed("versions", aligned([["", *different], *rows]), problem, fix, ConfigurationError)
    else:
        yield Finding("versions", f"the same on {len(hosts)} hosts: {', '.join(MUST_AGREE)}")
    have = {facts.host: f"{len(facts.gpus)} x {', '.join(sorted({gpu.name for gpu in facts.gpus}))}" for facts in hosts}
    if any(facts.gpus for facts in hosts) and len(set(have.values())) > 1:
        seen = "; ".join(f"{host}: {gpus}" for host, gpus in have.items())
        fix = "give each host's number as slots= in the hostfile, or leave the odd host out"
        yield Finding("gpus", seen, "the hosts have different GPUs, and the slowest sets the pace", fix)
    # the two left out name a host's own devices and interfaces
    names = sorted(
        {name for facts in hosts for name in facts.variables} - {"CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"}
    )
    for name in names:
        values = {facts.host: facts.variables.get(name, "not set") for facts in hosts}
        if len(set(values.values())) > 1:
            seen = f"{name}: " + ", ".join(f"{host} {value}" for host, value in values.items())
            yield Finding("environment", seen, "it differs between hosts", "export the same value on each")


def clocks(offsets: Mapping[str, float]) -> Finding:
    """Judge the hosts' clocks. offsets: host to seconds ahead of the first rank, the network's delay included."""
    # From the median, because the first rank's clock may be the wrong one. Of two clocks that differ by more than the
    # limit, one is more than half of it away.
    middle = statistics.median(offsets.values())
    apart = {host: value - middle for host, value in offsets.items()}
    spread = max(apart.values()) - min(apart.values())
    wrong = [f"{host} is {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}" for host, by in apart.items()
             if abs(by) > CLOCK_SECONDS / 2]  # fmt: skip
    if spread <= CLOCK_SECONDS:
        return Finding("clock", f"{len(offsets)} hosts within {spread:.2f} s")
    problem = f"clocks differ: {', '.join(wrong)}"
    return failed("clock", f"{spread:.1f} s apart", problem, "sudo chronyc makestep, or timedatectl set-ntp true",
                  TopologyError)  # fmt: skip


def links(speeds: Mapping[tuple[str, str], float], promised: float) -> Iterator[Finding]:
    """Judge the bandwidths of all pairs of hosts.

    Args:
        speeds: pair to bytes per second and direction.
        promised: bytes per second of the slowest interface, 0.0 if not known.
    """
    if not speeds:
        return
    middle = statistics.median(speeds.values())
    beside = f"; the interface promises {promised / 1e9:.2f} GB/s" if promised else ""
    low, high = min(speeds.values()) / 1e9, max(speeds.values()) / 1e9
    seen = f"{len(speeds)} pair{'s' * (len(speeds) > 1)} of hosts, {low:.2f} to {high:.2f} GB/s{beside}"
    slow = sorted(pair for pair, speed in speeds.items() if speed < SLOW_PAIR * middle)
    if slow:
        shown = ", ".join(f"{a} - {b} {speeds[a, b] / 1e9:.2f} GB/s" for a, b in slow[:5])
        problem = f"slow compared with the median of {middle / 1e9:.2f} GB/s: {shown}"
        yield Finding("links", seen, problem, "look at the cable, port and switch of the host that is in all of these")
    elif promised and middle < SLOW_LINK * promised:
        problem = "all links are far slower than the interface promises"
        yield Finding("links", seen, problem, "ethtool shows duplex and errors; iperf3 measures without samecurve")
    else:
        yield Finding("links", seen)
