"""The doctor on every rank of a launcher: one table of all hosts, the shared folder, and the links between hosts.

Ranks talk through torch's TCPStore first, so that a host whose collectives would not connect can still say why.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from samecurve.bench import collectives
from samecurve.distributed import network
from samecurve.doctor import examination, host_checks, shared_folder
from samecurve.doctor.findings import Finding, failed
from samecurve.doctor.host import HostFacts
from samecurve.doctor.shared_folder import SharedFolder
from samecurve.errors import SamecurveError, TopologyError

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.strategy.plan import Strategy

MESSAGE_BYTES = 8 << 20
_NAME = "doctor"


def run(
    recipe: Recipe | None,
    strategy: Strategy | None,
    needed_bytes: Mapping[str, tuple[int, int]],
    seconds: float,
    json_file: str | None,
) -> int:
    """Examine this rank's host and, together with the other ranks, the cluster. Rank 0 prints; see `examination`.

    Args:
        seconds: limit of each stage.
    """
    facts, own = examination.look(recipe, strategy, needed_bytes)
    results = examine(facts, own, recipe.output_dir if recipe else None, seconds)
    # as a rule only rank 0 has findings, but a doctor that started this one by ssh reads JSON from every rank
    return examination.report(results, json_file) if results or json_file == "-" else 0


def examine(facts: HostFacts, own: list[Finding], output_dir: str | None, seconds: float) -> list[Finding]:
    """Compare all ranks' hosts. Returns everything found on rank 0, and on another rank only why it cannot take part.

    Args:
        own: the findings about this rank's host.
        output_dir: the folder that all hosts have to share; None to leave it out.
        seconds: limit of each stage.
    """
    try:
        world = World.join(os.environ, seconds)
    except (RuntimeError, KeyError, ValueError) as error:  # torch's DistNetworkError is a RuntimeError
        return [*own, _unreachable(facts, os.environ, error)]
    try:
        return _compare(world, facts, own, output_dir)
    except RuntimeError as error:  # the first rank, which hosts the store, has ended
        return [*own, _unreachable(facts, os.environ, error)]


def _compare(world: World, facts: HostFacts, own: list[Finding], output_dir: str | None) -> list[Finding]:
    members = world.all_gather("facts", {"facts": asdict(facts), "findings": [asdict(finding) for finding in own]})
    missing = world.from_first("missing", sorted(set(range(world.size)) - set(members)))
    if missing:
        world.end(members)
        shown, address = ", ".join(map(str, missing)), f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
        problem = f"they did not report within {world.seconds:.0f} s"
        fix = f"look at what their hosts print; they have to reach {address}"
        absent = failed("network", f"ranks {shown}", problem, fix, TopologyError)
        return [*own, absent] if world.rank == 0 else []
    first: dict[str, tuple[int, HostFacts]] = {}  # rank of each machine
    for rank in sorted(members):
        there = HostFacts.from_json(members[rank]["facts"])
        first.setdefault(there.machine, (rank, there))
    names = Counter(there.host for _, there in first.values())
    hosts = {  # cloned machines of one name get their rank added
        rank: replace(there, host=f"{there.host} (rank {rank})") if names[there.host] > 1 else there
        for rank, there in first.values()
    }
    results = [
        Finding(**{**finding, "host": hosts[rank].host}) for rank in hosts for finding in members[rank]["findings"]
    ]
    if len(hosts) > 1:
        results += host_checks.compare(list(hosts.values()))
        # all ranks wait for one key, and report their time when it appears
        world.barrier("before the clock")  # else the key could be there before the slowest waits for it
        world.from_first("now", None)
        times = world.all_gather("clock", time.time())
        # a host that died meanwhile says nothing here; the process group will name it
        start = times.get(0, times[world.rank])
        ahead = {facts.host: times[rank] - start for rank, facts in hosts.items() if rank in times}
        results.append(host_checks.clocks(ahead))
    if output_dir:
        results.append(_shared_folder(world, hosts, Path(output_dir)))
    results += _links(world, hosts)
    world.end(members)
    return results if world.rank == 0 else []


class World:
    """All ranks of the launcher, which exchange JSON through a store."""

    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float):
        self.store, self.rank, self.size, self.seconds = store, rank, size, seconds

    @classmethod
    def join(cls, environ: Mapping[str, str], seconds: float) -> World:
        """Connect to the first rank, as `init_process_group` does from the same variables of the environment."""
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        # torchrun's agent holds the store at this port already: rank 0 is then a client as the others are
        by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        limit = timedelta(seconds=seconds)
        # Rank 0 does not wait for all to connect: `all_gather` tells which of them are missing.
        if network.listens_here(environ):
            return cls(dist.PrefixStore(_NAME, network.local_store(environ, None, limit)), rank, size, seconds)
        store = dist.TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            None,
            rank == 0 and not by_agent,
            limit,
            wait_for_workers=False,
        )
        return cls(dist.PrefixStore(_NAME, store), rank, size, seconds)

    def all_gather(self, key: str, value: Any) -> dict[int, Any]:
        """Give a value to all and return every rank's. Ranks that say nothing in time are left out."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        deadline, values = time.monotonic() + self.seconds, {}
        for rank in range(self.size):
            # not 0, so that ranks that have spoken are read after the deadline, too
            remaining = max(0.1, deadline - time.monotonic())
            try:
                self.store.wait([f"{key}/{rank}"], timedelta(seconds=remaining))
            except RuntimeError:
                continue
            values[rank] = json.loads(self.store.get(f"{key}/{rank}"))
        return values

    def from_first(self, key: str, value: Any) -> Any:
        """Return rank 0's value."""
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
        self.store.wait([key], timedelta(seconds=2 * self.seconds))  # rank 0 may have waited for others before
        return json.loads(self.store.get(key))

    def barrier(self, key: str) -> None:
        self.all_gather(key, True)

    def end(self, ranks: Iterable[int]) -> None:
        """Leave. Rank 0 hosts the store, so it stays until none of these ranks needs it any more."""
        self.store.set(f"end/{self.rank}", "")
        if self.rank == 0:
            with suppress(RuntimeError):  # who has not left by now has died
                self.store.wait([f"end/{rank}" for rank in ranks], timedelta(seconds=self.seconds))


def _unreachable(facts: HostFacts, environ: Mapping[str, str], error: Exception) -> Finding:
    address, port = environ.get("MASTER_ADDR", "not set"), environ.get("MASTER_PORT", "not set")
    seen = f"rank {environ.get('RANK')}: {str(error).splitlines()[0]}"
    problem = f"this host does not reach the first rank at {address} port {port}"
    fix = f"try nc -vz {address} {port} here; open the port in the firewall, or give another master address"
    return failed("network", seen, problem, fix, TopologyError, facts.host)


def _shared_folder(world: World, hosts: Mapping[int, HostFacts], output_dir: Path) -> Finding:
    """Test output_dir: the first rank writes into it, and the first rank of every other host reads."""
    folder = SharedFolder(output_dir, world.from_first("token", uuid.uuid4().hex[:8]))
    problem = ""
    with ExitStack() as stack:
        if world.rank == 0:
            try:
                stack.enter_context(folder.led())
            except OSError as error:
                problem = f"{error.filename or output_dir}: {error.strerror}"
        problem = world.from_first("folder", problem)
        follows = world.rank != 0 and world.rank in hosts and not problem
        seen = world.all_gather("followed", folder.follow() if follows else problem)
    silent = f"no answer within {world.seconds:.0f} s"
    return shared_folder.judge(str(output_dir), {facts.host: seen.get(rank, silent) for rank, facts in hosts.items()})


def _links(world: World, hosts: Mapping[int, HostFacts]) -> list[Finding]:
    """Connect a process group as a run does, measure every pair of hosts and one collective over all ranks."""
    problem, gpus = "", torch.cuda.is_available()
    limit = timedelta(seconds=world.seconds)
    try:
        network.choose_interface()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(device)
        store = dist.PrefixStore("group", world.store)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
        dist.all_reduce(torch.zeros(1))  # on the CPU, so by gloo, also beside NCCL
    except (RuntimeError, SamecurveError) as error:
        problem = str(error).splitlines()[0]
    facts = hosts.get(world.rank)
    own = facts.own_address if facts else ""
    problems = {rank: text for rank, text in world.all_gather("gloo", problem).items() if text}
    if problems:
        interface = os.environ.get(network.VARIABLE, f"that of {own}")
        rank = min(problems)
        host, seen = hosts[rank].host if rank in hosts else f"rank {rank}", f"gloo over {interface}: {problems[rank]}"
        fix = f"export {network.VARIABLE}=... with the interface that reaches the other hosts, on each host"
        return [failed("network", seen, "the process group does not connect", fix, TopologyError, host)]
    speeds, reduced = {}, []
    try:
        speeds = _pairs(world, sorted(hosts)) if len(hosts) > 1 else {}
        reduced = list(collectives.measure(["all_reduce"], [MESSAGE_BYTES], device, 0.2))
    except RuntimeError as error:  # NCCL makes its communicator here
        if not gpus:
            raise
        problem = str(error).splitlines()[0]
    finally:
        dist.destroy_process_group()
    problems = {rank: text for rank, text in world.all_gather("nccl", problem).items() if text}
    if problems:
        rank = min(problems)
        host, seen = hosts[rank].host if rank in hosts else f"rank {rank}", f"NCCL: {problems[rank]}"
        fix = "start again with NCCL_DEBUG=INFO, which names the network, the peer or the memory that fails"
        return [failed("links", seen, "the GPUs do not reach each other", fix, TopologyError, host)]
    names = {rank: facts.host for rank, facts in hosts.items()}
    promised = [facts.speeds[facts.route] for facts in hosts.values() if facts.route in facts.speeds]
    results = list(
        host_checks.links(
            {(names[a], names[b]): speed for (a, b), speed in speeds.items()}, min(promised, default=0) * 1e6 / 8
        )
    )
    for timing in reduced:
        if isinstance(timing, collectives.Timing):
            where = f"{world.size} {'GPUs' if gpus else 'processes'} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
            seen = f"all_reduce of {MESSAGE_BYTES >> 20} MiB over {where}: {timing.bus_gb_per_second:.2f} GB/s (bus)"
            results.append(Finding("links", seen))
    return results


def _pairs(world: World, ranks: list[int]) -> dict[tuple[int, int], float]:
    """Measure each pair of ranks, disjoint pairs at a time. Returns bytes per second and direction."""
    measured = []
    for number, pairs in enumerate(rounds(ranks)):
        world.barrier(f"round {number}")
        for pair in pairs:
            if world.rank in pair:
                measured.append([*pair, _exchange(sum(pair) - world.rank)])
    everything = world.all_gather("pairs", measured)
    slowest: dict[tuple[int, int], float] = {}
    for first, second, speed in (pair for pairs in everything.values() for pair in pairs):
        slowest[first, second] = min(speed, slowest.get((first, second), speed))
    return slowest


def rounds(ranks: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Divide all pairs into rounds of disjoint ones, as in a tournament: one stays, the others move round a circle."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _exchange(peer: int) -> float:
    """Send and receive at once, and return the bytes per second of one direction. The first exchange connects."""
    ours, theirs = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        # the tuple starts both before the first is waited for
        for request in (dist.isend(ours, peer), dist.irecv(theirs, peer)):
            assert request
            request.wait()
        seconds = time.perf_counter() - began
    return MESSAGE_BYTES / seconds
