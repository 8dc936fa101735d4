"""Where the processes of a run listen: on loopback alone on one machine, else on the right interface for gloo.

gloo listens on the address that the host's own name resolves to. On many clusters that is 127.0.1.1, which no other
host can reach, although NCCL, which looks at the interfaces, connects without any setting.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from samecurve.errors import TopologyError

if TYPE_CHECKING:
    import torch.distributed as dist

VARIABLE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"  # an address reserved for documentation (RFC 5737); nothing is sent there
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")  # torchrun's and deepspeed's


def choose_interface(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set GLOO_SOCKET_IFNAME in a world of several processes, unless the user has set it.

    Where all of them are on this machine and meet at a loopback address, the interface is loopback, for NCCL too.

    The interface is that of the route to the master address. A host whose own name is the master address may resolve it
    to 127.0.1.1; there the interface of the default route is taken, or the only one. So it is with a loopback address
    that several hosts are given: through a tunnel, or as a launcher rehearses several hosts on one machine.

    Raises:
        TopologyError: none of these exists, several interfaces are up, and the address is not loopback.
    """
    master = environ.get("MASTER_ADDR", "")
    if is_loopback(master) and not _spans_hosts(environ):
        names = [name for address, name in _addresses().items() if address == master]
        for variable in (VARIABLE, "NCCL_SOCKET_IFNAME") if names else ():
            environ.setdefault(variable, names[0])
        return
    if VARIABLE in environ or not _spans_hosts(environ) or master in ("", "localhost"):
        return
    addresses = interfaces()
    if not addresses:
        return  # loopback alone is up: what the launcher counts as hosts is this machine (a rehearsal in a container)
    interface = addresses.get(source_address(master)) or addresses.get(source_address(_ELSEWHERE))
    names = sorted(set(addresses.values()))
    if interface is None and len(names) != 1 and is_loopback(master):
        return  # a rehearsal: gloo listens where this machine's own name leads
    if interface is None and len(names) != 1:
        raise TopologyError(
            f"{VARIABLE}: not set, and the master address {master!r} does not say over which of this host's network "
            f"interfaces ({', '.join(names)}) the other hosts can be reached; export {VARIABLE}=... on "
            "every host"
        )
    environ[VARIABLE] = interface or names[0]


def _spans_hosts(environ: Mapping[str, str]) -> bool:
    world = int(environ.get("WORLD_SIZE", "1"))
    # without a launcher that says how many are here, all are
    return world > int(next((environ[name] for name in _LOCAL_SIZES if name in environ), world))


def free_port() -> int:
    """Return a port of this machine at which nobody listens; another program could take it before it is used.

    It lies below the ports of outgoing connections (32768 and up on Linux), one of which could take it, too.
    """
    draw = random.SystemRandom()  # not the seeded one, with which processes beside this one would draw the same
    while True:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", draw.randrange(15_000, 32_000)))
                return listener.getsockname()[1]
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise


def is_loopback(address: str) -> bool:
    """Whether every host that is given this address reaches itself: all processes are on one machine then."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def rendezvous() -> str:
    """Return the `init_method` of process groups: torch's own, or one that listens on loopback alone.

    torch's store listens on all addresses of a host, and who reaches it is in the processes of the run. Where the
    master address is loopback, and no launcher's agent has the store already, rank 0 makes it from a socket of its own.
    """
    if not listens_here(os.environ):
        return "env://"
    _register()
    return "loopback://"


def listens_here(environ: Mapping[str, str]) -> bool:
    """Whether rank 0 is to make the store, for processes of this machine only."""
    return is_loopback(environ.get("MASTER_ADDR", "")) and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


@cache
def _register() -> None:
    import torch.distributed as dist

    stores: dict[str, dist.Store] = {}  # by port: one for all groups of this process

    def meet(_: str, timeout: timedelta, **__: object) -> Iterator[tuple[dist.Store, int, int]]:
        rank, size, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_PORT"]
        if port not in stores:
            stores[port] = local_store(os.environ, size, timeout)
        yield stores[port], rank, size
        raise RuntimeError("the ranks of a run meet once")

    dist.register_rendezvous_handler("loopback", meet)


def local_store(environ: Mapping[str, str], size: int | None, timeout: timedelta) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, a loopback address: rank 0 listens there and nowhere else.

    Args:
        size: number of ranks to wait for; None to wait for none.
    """
    import torch.distributed as dist

    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    options = {"world_size": size, "timeout": timeout, "wait_for_workers": size is not None}
    if environ["RANK"] != "0":
        return dist.TCPStore(address, port, is_master=False, **options)
    with socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as made:
        listener = made.detach()  # the store closes it
    return dist.TCPStore(address, port, is_master=True, master_listen_fd=listener, **options)


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
    return {address: name for address, name in _addresses().items() if not is_loopback(address)}


def _addresses() -> dict[str, str]:
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = ((address, name) for name, all_ in psutil.net_if_addrs().items() if name in up for address in all_)
    # psutil appends the interface to link-local IPv6 addresses (fe80::1%eth0), getsockname does not
    return {address.address.partition("%")[0]: name for address, name in addresses if address.family in families}
