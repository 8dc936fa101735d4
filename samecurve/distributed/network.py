"""The network interface of gloo's process groups on several hosts.

gloo listens on the address that the host's own name resolves to. On many clusters that is 127.0.1.1, which no other
host can reach, although NCCL, which looks at the interfaces, connects without any setting.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping

from samecurve.errors import TopologyError

VARIABLE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"  # an address reserved for documentation (RFC 5737); nothing is sent there
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")  # torchrun's and deepspeed's


def choose_interface(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set GLOO_SOCKET_IFNAME in a world of several hosts, unless the user has set it.

    The interface is that of the route to the master address. A host whose own name is the master address may resolve it
    to 127.0.1.1; there the interface of the default route is taken, or the only one.

    Raises:
        TopologyError: none of these exists, and several interfaces are up.
    """
    master = environ.get("MASTER_ADDR", "")
    if VARIABLE in environ or not _spans_hosts(environ) or _is_this_host(master):
        return
    addresses = interfaces()
    if not addresses:
        return  # loopback alone is up: what the launcher counts as hosts is this machine (a rehearsal in a container)
    found = addresses.get(source_address(master)) or addresses.get(source_address(_ELSEWHERE))
    names = sorted(set(addresses.values()))
    if found is None and len(names) != 1:
        raise TopologyError(
            f"{VARIABLE}: not set, and the master address {master!r} does not say over which of this host's network "
            f"interfaces ({', '.join(names)}) the other hosts can be reached; export {VARIABLE}=... on "
            "every host"
        )
    environ[VARIABLE] = found or names[0]


def _spans_hosts(environ: Mapping[str, str]) -> bool:
    world = int(environ.get("WORLD_SIZE", "1"))
    return world > int(next(environ[name] for name in _LOCAL_SIZES if name in environ)) if world > 1 else False


def _is_this_host(address: str) -> bool:
    """Whether every host that is given this address reaches itself: all processes are on one machine then."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in ("", "localhost")


def source_address(address: str) -> str:
    """Return this host's address on the route to `address`, "" without a route. Connecting UDP sends nothing."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]  # any port would do
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0]
    except OSError:
        return ""


def interfaces() -> dict[str, str]:
    """Map each address of this host to its interface, for interfaces that are up, without loopback."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    found = ((each, name) for name, all_ in psutil.net_if_addrs().items() if name in up for each in all_)
    # psutil appends the interface to link-local IPv6 addresses (fe80::1%eth0), getsockname does not
    by_address = {each.address.partition("%")[0]: name for each, name in found if each.family in families}
    return {address: name for address, name in by_address.items() if not ipaddress.ip_address(address).is_loopback}
