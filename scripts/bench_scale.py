"""What one step, one save, one resume and the heartbeats cost outside the engine, by the number of ranks.

    python scripts/bench_scale.py [--ranks 2 4 8 16 32 64 128] [--output benchmarks/scale.md]
    python scripts/bench_scale.py --ranks 2 4 --json        # the numbers alone, for tests

The ranks are forked from one process, talk over gloo and share this machine's cores; their engine trains nothing. Bytes
and system calls are those that Linux counts for each process (/proc/self/io), so that they hold for any machine.
Milliseconds are those of a machine with fewer cores than ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import commit  # noqa: E402
from benchmarks.markdown import table  # noqa: E402

STEPS, STEP_SECONDS = 20, 0.05
PARAMETERS, VALUES = 200, 16  # each rank holds 16 values of each, as under FSDP
SETTLE_SECONDS = 0.3  # gloo's own thread may send a little later
LARGE = (1024, 16384)
HEARTBEAT_RANKS = (64, 128, 1024, 16384)
RANKS_PER_HOST = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "scale.md")
    parser.add_argument("--json", action="store_true", help="print the numbers and write no page")
    arguments = parser.parse_args()
    if not Path("/proc/self/io").exists():
        sys.exit("/proc/self/io is not there: the bytes are counted by Linux, on other systems they are not known")
    import_all()
    load = os.getloadavg()[0]
    measured = {size: measure(size, show=not arguments.json) for size in arguments.ranks}
    if arguments.json:
        print(json.dumps(measured))
    else:
        with tempfile.TemporaryDirectory() as folder:
            beats = {size: count_heartbeats(Path(folder) / str(size), size) for size in HEARTBEAT_RANKS}
        text = report(measured, beats, load)
        arguments.output.write_text(text, encoding="utf-8")
        print(text)


# Measuring


def import_all() -> None:
    """Import once what forked ranks would each import."""
    import torch.distributed.tensor  # noqa: F401

    import samecurve.checkpoint.manager
    import samecurve.distributed.control_group  # noqa: F401


def measure(size: int, show: bool = False) -> dict[str, dict]:
    """Run all of `rank` with `size` forked ranks.

    Returns:
        For each operation what `Counted` says: "sent", "read" in bytes and "writes" in calls of rank 0, of the other
        rank with most ("each") and of all ranks, and "ms", that of the slowest rank.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        children = [fork(lambda number=number: rank(number, size, port, folder)) for number in range(size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{sum(map(bool, codes))} of {size} ranks failed")
        found = [json.loads((folder / f"{number}.json").read_text()) for number in range(size)]
    if show:
        print(f"{size} ranks: done", flush=True)
    return {key: together([each[key] for each in found]) for key in found[0]}


def together(of_ranks: list[dict]) -> dict:
    merged: dict = {"ms": max(each["ms"] for each in of_ranks)}
    for key in ("sent", "read", "writes"):
        values = [each[key] for each in of_ranks]
        merged[key] = {"rank 0": values[0], "each": max(values[1:], default=0), "all": sum(values)}
    return merged


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Counted:
    """Counts what this process does in its body, divided by `times`, without the barrier that comes before.

    Attributes:
        barrier: what an empty body is counted with; set by the first use.
    """

    barrier: dict[str, int] | None = None

    def __init__(self, found: dict, name: str, times: int = 1):
        self._found, self._name, self._times = found, name, times

    def __enter__(self) -> None:
        from torch import distributed as dist

        dist.barrier()
        time.sleep(SETTLE_SECONDS)
        self._before = counters()
        dist.barrier()  # else a rank might begin before another one, whose store it asks, has read its counters
        self._began = time.perf_counter()

    def __exit__(self, *_) -> None:
        seconds = time.perf_counter() - self._began
        time.sleep(SETTLE_SECONDS)
        change = {key: value - self._before[key] for key, value in counters().items()}
        empty = Counted.barrier = Counted.barrier or change
        counted = {key: (value - empty[key]) / self._times for key, value in change.items()}
        self._found[self._name] = counted | {"ms": 1000 * seconds / self._times}


def counters() -> dict[str, int]:
    """Bytes written to sockets and files, bytes read from files, calls that write; of this process since its start."""
    lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = {key: int(value) for key, value in lines}
    return {"sent": found["wchar"], "read": found["rchar"], "writes": found["syscw"]}


def rank(number: int, size: int, port: int, folder: Path) -> None:
    import torch
    from torch import distributed as dist

    from samecurve.distributed.control_group import ControlGroup

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST)}
    os.environ |= {"LOCAL_RANK": str(number % RANKS_PER_HOST), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    found: dict = {}
    with Counted(found, "nothing"):
        pass
    with Counted(found, "group, all connected"):
        eager = dist.new_group(backend="gloo")
    before = num_open()
    with Counted(found, "group"):
        world = ControlGroup()
    count_steps(found, world)
    count_tokens(found, world)
    count_saves(found, world, eager, folder)
    found["connections"] = {"sent": num_open() - before, "read": 0, "writes": 0, "ms": 0.0}
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.barrier()


def num_open() -> int:
    return sum(os.readlink(path).startswith("socket:") for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def count_steps(found: dict, world) -> None:
    from samecurve.distributed.control_group import StopVote

    vote, waited = StopVote(world), []
    vote.reason("", at_once=True)  # connects
    with Counted(found, "step", STEPS):
        for _ in range(STEPS):
            time.sleep(STEP_SECONDS)
            began = time.perf_counter()
            vote.reason("", at_once=False)
            waited.append(1000 * (time.perf_counter() - began))
    found["step"]["ms"] = statistics.median(waited)
    with Counted(found, "step, waited for", STEPS):
        for _ in range(STEPS):
            world.start_any(False)()


def count_tokens(found: dict, world) -> None:
    """Sum a step's counts, asked for when the step begins, or when the step before it began."""
    for name, ahead in {"tokens": 0, "tokens, ahead": 1}.items():
        started, waited = deque(world.start_sum(range(3)) for _ in range(ahead)), []
        with Counted(found, name, STEPS):
            for _ in range(STEPS):
                time.sleep(STEP_SECONDS)
                began = time.perf_counter()
                started.append(world.start_sum(range(3)))
                started.popleft().wait()
                waited.append(1000 * (time.perf_counter() - began))
        for each in started:
            each.wait()
        found[name]["ms"] = statistics.median(waited)


def count_saves(found: dict, world, eager, folder: Path) -> None:
    from torch import distributed as dist

    from samecurve.checkpoint.manager import Checkpoints, TrainProgress
    from samecurve.checkpoint.snapshot import Snapshot

    class Run:
        checkpoints = folder / "checkpoints"

        def sync_metrics(self) -> None:
            pass

    engine: Any = ToyEngine(world.rank, world.size)
    settings = {"every_steps": 1, "keep": 2, "best": None}
    recipe = {"seed": 0, "steps": 9, "checkpoint": settings}
    facts: dict = {"recipe": recipe, "model": {}, "data": {}, "strategy": "toy", "world_size": world.size}
    facts["versions"] = {}
    checkpoints = Checkpoints(Run(), facts, world, lambda text: None)
    checkpoints.save(engine, TrainProgress(1), wait=True)  # connects
    with Counted(found, "save"):
        checkpoints.save(engine, TrainProgress(2), wait=True)
    found["save"]["sent"] -= written(Run.checkpoints / "step_00000002", world.rank)
    values: list = [None] * world.size
    index = Snapshot(engine).regions
    with Counted(found, "save, its messages"):
        for value in (0, index):
            world.conclude(value, len)
    with Counted(found, "save, by all_gather_object"):
        for value in (0, None, index, None):
            dist.all_gather_object(values, value, group=eager)
    size = sum(path.stat().st_size for path in Run.checkpoints.glob("step_00000002/*")) if world.is_main else 0
    found["files"] = {"sent": 0, "read": size, "writes": 0, "ms": 0.0}  # what there is to read, once
    with Counted(found, "find"):
        folder_found = checkpoints.find("auto")
    assert folder_found is not None
    with Counted(found, "load"):
        checkpoints.load(folder_found, engine)


def written(checkpoint: Path, number: int) -> int:
    """Bytes of the files that one rank wrote: its own, and on rank 0 all that are not a rank's."""
    names = [path for path in checkpoint.iterdir() if not path.name.startswith("rank_") and number == 0]
    return sum(path.stat().st_size for path in [*names, checkpoint / f"rank_{number:05d}.safetensors"])


class ToyEngine:
    """An engine that holds some values of each of 200 parameters and trains nothing."""

    def __init__(self, number: int, size: int):
        import torch

        from samecurve.interfaces.region import Region
        from samecurve.interfaces.sharded_state import WEIGHT, ShardRange

        names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(PARAMETERS)]
        held = [ShardRange(name, Region(number * VALUES, VALUES), range(VALUES)) for name in names]
        tensors = [torch.zeros(VALUES) for _ in names]

        def visit(writing: bool = False) -> Iterator:
            yield from ((part, WEIGHT, tensor) for part, tensor in zip(held, tensors, strict=True))

        self.shapes = {name: (size * VALUES,) for name in names}
        self.state = SimpleNamespace(kinds=dict.fromkeys(names, (WEIGHT,)), factors={}, codes=())
        self.state.ranges, self.state.visit, self.state.finish = lambda: held, visit, lambda updates: None
        self.device, self.shard, self.loss_scale_state = torch.device("cpu"), (number, size), {}


def count_heartbeats(folder: Path, size: int) -> dict[str, tuple[int, int, float]]:
    """Write the heartbeats of a run and let three of its ranks look at them.

    Returns:
        For rank 0, the first rank of another host and a rank that is no first one: (files, bytes, milliseconds) per
        look.
    """
    from unittest import mock

    from samecurve.run import beats, heartbeat, heartbeat_relay
    from samecurve.run.beats import Beat, Peer, write_beat
    from samecurve.run.heartbeat import Heartbeats

    def beat(number: int) -> Beat:
        host = number // RANKS_PER_HOST
        return Beat(number, os.getpid(), f"host{host}", f"machine {host}", "step", 12, 40, 3, 1.5, time.time())

    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST)}
    for number in range(size):
        write_beat(folder, beat(number))
    for first in range(0, size, RANKS_PER_HOST):
        local = range(first, first + RANKS_PER_HOST)
        peers = [Peer(beat(number), time.monotonic()) for number in local[1:]]
        if size > heartbeat.MOST_FILES:
            heartbeat_relay.Relay(folder, first, local, stale=15.0).write(beat(first), peers)
    found, read = {}, beats.read_object
    for name, number in {"rank 0": 0, "first rank of a host": 8, "another rank": 9}.items():
        os.environ["LOCAL_RANK"] = str(number % RANKS_PER_HOST)
        own = Heartbeats(folder, lambda number=number: beat(number), 5.0, 1.0)
        own.look()  # writes what others read, for a first rank
        paths: list[Path] = []

        def counting(path: Path, paths: list[Path] = paths) -> dict | None:
            paths.append(path)
            return read(path)

        began = time.perf_counter()
        own.look()
        seconds = time.perf_counter() - began
        with (
            mock.patch.object(beats, "read_object", counting),
            mock.patch.object(heartbeat_relay, "read_object", counting),
        ):
            own.look()
        found[name] = len(paths), sum(path.stat().st_size for path in paths if path.exists()), 1000 * seconds
    return found


# Fitting and reporting

FORMS: dict[str, Callable[[float], float]] = {
    "": lambda size: 0.0,
    "/ N": lambda size: 1 / size,
    "log2(N)": lambda size: math.log2(size),
    "N": lambda size: size,
    "N^2": lambda size: size**2,
}
TOLERANCE, USELESS = 0.05, 0.5


def fit(points: dict[int, float], forms: dict = FORMS) -> tuple[str, Callable[[float], float]]:
    """Fit a + b f(N), with the first of the forms f that is within 5 % of all points, else with the closest one."""
    import numpy as np

    sizes, values = np.array(list(points)), np.array(list(points.values()))
    fits = []
    for name, form in forms.items():
        columns = np.array([[1.0, form(size)] if name else [1.0] for size in sizes])
        weights = 1 / np.maximum(values, max(values.max() / 20, 1e-9))  # relative errors, of small values less so
        found, *_ = np.linalg.lstsq(columns * weights[:, None], values * weights, rcond=None)
        error = np.abs((columns @ found - values) * weights).max()
        a, b = float(found[0]) + 0.0, float(found[1]) if name else 0.0
        fits.append((error, name, a, b, form))
    best = next((each for each in fits if each[0] < TOLERANCE), min(fits, key=lambda each: each[0]))
    error, name, a, b, form = best
    if error > USELESS:
        return "none", lambda size: math.nan
    text = f"{a:,.0f} + {b:,.3g} {name}" if name else f"{a:,.0f}"
    text += f", {error:.0%} off" if error >= TOLERANCE else ""
    return text, lambda size: a + b * form(size)


OPERATIONS = {
    "group": "create a group",
    "group, all connected": "the same, as gloo does by default",
    "step": "a step: does anybody want to stop?",
    "tokens": "a step: how many tokens?",
    "save": "a save",
    "save, by all_gather_object": "the same, by `all_gather_object`",
    "find": "find and verify a checkpoint",
    "load": "load it (200 parameters)",
}


def sent_table(measured: dict[int, dict]) -> str:
    sizes = [*measured]
    rows = []
    for key, name in OPERATIONS.items():
        for who in ("rank 0", "another rank"):
            points = {size: sent(found[key], size, who) for size, found in measured.items()}
            text, fitted = fit(points)
            # the store answers some ranks after it was counted, and each time a different number of them
            large = ["", "", ""] if key == "group" else [*(f"{fitted(size):,.0f}" for size in LARGE), f"`{text}`"]
            rows.append([name, who, *(f"{points[size]:,.0f}" for size in sizes), *large])
    return table(["", "", *map(str, sizes), *(f"{size:,} (fit)" for size in LARGE), "fit"], rows)


def sent(found: dict, size: int, who: str) -> float:
    """Bytes sent by rank 0, or by another rank on average."""
    others = (found["sent"]["all"] - found["sent"]["rank 0"]) / (size - 1)
    return found["sent"]["rank 0"] if who == "rank 0" else others


def connection_table(measured: dict[int, dict]) -> str:
    """Those of the group that steps use and of the group that saves use, after both have been used."""
    rows = [
        [who, *(f"{found['connections']['sent'][key]:,}" for found in measured.values())]
        for who, key in {"rank 0": "rank 0", "the other rank with most": "each"}.items()
    ]
    return table(["", *map(str, measured)], rows)


def read_table(measured: dict[int, dict]) -> str:
    rows = [
        [name, *(f"{found[key]['read']['all']:,.0f}" for found in measured.values())]
        for key, name in {"files": "the files of the checkpoint", "find": OPERATIONS["find"]}.items()
    ]
    return table(["", *map(str, measured)], rows)


def time_table(measured: dict[int, dict]) -> str:
    names = {"step": "a step: what the loop waits", "step, waited for": "a step: until the answer is there"}
    names |= {"tokens": "tokens, asked for when the step begins", "tokens, ahead": "tokens, asked for a step ahead"}
    names |= {"save, its messages": "a save: its messages", "save, by all_gather_object": "by `all_gather_object`"}
    names |= {"save": "a save, until it is committed", "find": OPERATIONS["find"]}
    rows = []
    for key, name in names.items():
        points = {size: found[key]["ms"] for size, found in measured.items()}
        _, fitted = fit(points, {name: FORMS[name] for name in ("", "N")})
        large = ["" if key == "save" else f"{fitted(size):,.0f}" for size in LARGE]
        rows.append([name, *(f"{value:,.2f}" for value in points.values()), *large])
    return table(["ms", *map(str, measured), *(f"{size:,} (fit)" for size in LARGE)], rows)


def heartbeat_table(beats: dict[int, dict]) -> str:
    rows = [
        [
            who,
            *(
                f"{found[who][0]:,} files, {found[who][1] / 1024:,.0f} KiB, {found[who][2]:,.1f} ms"
                for found in beats.values()
            ),
        ]
        for who in next(iter(beats.values()))
    ]
    return table(["per look", *(f"{size:,}" for size in beats)], rows)


def report(measured: dict[int, dict], beats: dict[int, dict], load: float) -> str:
    from samecurve.specs.environment import processor, version

    return f"""# What runs beside the engine, by number of ranks

Measured on {date.today()} by `python scripts/bench_scale.py`: {os.cpu_count()} cores ({processor()}), gloo over the
loopback interface, torch {version("torch")}, Python {platform.python_version()}, commit
{commit("benchmarks/scale.md")}. The machine's load was {load:.1f} when it began; counts do not depend on it.

The ranks are forked from one process. Their engine holds {VALUES} values of each of {PARAMETERS} parameters and trains
nothing.

Bytes are counted by Linux for each process (`/proc/self/io`), with gloo's own messages and without the files of a
checkpoint. The columns after the measured ones are extrapolated by the fit: constant, or with a multiple of 1/N,
log2(N), N or N^2, whichever is the first within {TOLERANCE:.0%} of all points. Where none is, the closest one is taken
and its largest error given, and above {USELESS:.0%} none.

## Bytes sent

{sent_table(measured)}

The answer to a step's question goes through all ranks in turn, in the background: the bytes per rank stay the same, the
time until it is there is proportional to the number of ranks. What rank 0 sends at a load is to each rank its part of
the index: which rank's file has which part of a parameter.

## Open sockets of the two control groups

{connection_table(measured)}

## Bytes read from files when a checkpoint is found, all ranks together

{read_table(measured)}

## Milliseconds

All ranks share {os.cpu_count()} cores and one disk, so that these times grow faster than those of a cluster. They are
extrapolated in proportion to N; a save until it is committed is not, because it is the disk's time.

{time_table(measured)}

## Heartbeats

A rank looks every 5 seconds; {RANKS_PER_HOST} ranks per host. Nothing is extrapolated: the files of so many ranks were
written to a local disk, and three of the ranks looked at them. Up to 64 ranks, rank 0 reads all files, and every rank
does before it takes something for a hang.

{heartbeat_table(beats)}
"""


if __name__ == "__main__":
    main()
