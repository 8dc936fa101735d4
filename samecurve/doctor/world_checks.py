"""Compares the hosts of one run: what has to be the same everywhere, and what the slowest decides."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from samecurve.doctor.findings import Finding, failed
from samecurve.doctor.host import HostFacts
from samecurve.errors import ConfigurationError, TopologyError
from samecurve.storage.terminal import aligned

# Another version may compute or send something else: the run would stop in a collective, or lose the same curve.
MUST_AGREE = ("python", "torch", "accelerate", "deepspeed", "transformers", "nccl", "driver")
# The first of several failed ranks is found by their hosts' clocks (run/liveness.py), and the age of another host's
# file by the own clock (run/status.py).
CLOCK_SECONDS = 2.0
SLOW_PAIR = 0.5  # of the median of all pairs
SLOW_LINK = 0.25  # of what the interface promises; one stream of gloo does not fill a fast one


def compare(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    """Yield the findings from a comparison of two or more hosts."""
    yield from _versions(hosts)
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


def _versions(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    different = [name for name in MUST_AGREE if len({facts.versions.get(name, "") for facts in hosts}) > 1]
    if not different:
        yield Finding("versions", f"the same on {len(hosts)} hosts: {', '.join(MUST_AGREE)}")
        return
    rows = [[facts.host, *(facts.versions.get(name) or "-" for name in different)] for facts in hosts]
    table = aligned([["", *different], *rows])
    drivers = different == ["driver"]
    fix = "install one driver on all hosts" if drivers else "pip install -r requirements.txt -c constraints.txt on each"
    yield failed("versions", table, f"{', '.join(different)} differ between hosts", fix, ConfigurationError)


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
