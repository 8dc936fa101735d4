"""The operations that are counted: a step's messages, a save, a resume. The engine of the ranks trains nothing."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.scale.counting import Counted, fork
from samecurve.distributed.network import free_port

STEPS, STEP_SECONDS = 20, 0.05
PARAMETERS, VALUES = 200, 16  # each rank holds 16 values of each, as under FSDP
RANKS_PER_HOST = 8


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
    vote.reason(None, at_once=True)  # connects
    with Counted(found, "step", STEPS):
        for _ in range(STEPS):
            time.sleep(STEP_SECONDS)
            began = time.perf_counter()
            vote.reason(None, at_once=False)
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
    from samecurve.config.schema import Checkpoint

    class Run:
        checkpoints = folder / "checkpoints"

        def sync_metrics(self) -> None:
            pass

    engine: Any = ToyEngine(world.rank, world.size)
    recipe: Any = SimpleNamespace(seed=0, steps=9, checkpoint=Checkpoint(every_steps=1))
    facts: dict = {"model": {}, "data": {"rows": ""}, "strategy": "toy", "world_size": world.size, "versions": {}}
    facts["recipe"] = {"seed": 0, "steps": 9, "checkpoint": {"every_steps": 1, "keep": 2, "best": None}}
    checkpoints = Checkpoints(Run(), recipe, facts, world, lambda text: None)
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
