"""Three ranks, forked here, that try the control group and the choice of a checkpoint. Prints what each of them got.

python control_probe.py FOLDER
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from saved_state import saved_state  # noqa: E402
from torch import distributed as dist  # noqa: E402

from benchmarks.scale.counting import fork  # noqa: E402
from samecurve.checkpoint import commit  # noqa: E402
from samecurve.checkpoint.manifest import file_name  # noqa: E402
from samecurve.checkpoint.resume import CheckpointSelector  # noqa: E402
from samecurve.distributed.control_group import ControlGroup, StopVote  # noqa: E402
from samecurve.distributed.network import free_port  # noqa: E402
from samecurve.errors import DataError, StorageError  # noqa: E402
from samecurve.storage.filesystem import LocalFileSystem  # noqa: E402
from samecurve.training import room  # noqa: E402

SIZE, LAST_STEP, SLOW_STEP, SLOW_SECONDS = 3, 9, 2, 1.0
ASKS = {1: 5, 2: 4}  # the step from which on a rank asks to stop
DISK = LocalFileSystem()


def save(directory: Path, step: int) -> Path:
    """A checkpoint with one file for each of three ranks."""

    def write(folder: Path):
        names = [file_name(rank) for rank in range(SIZE)]
        return [commit.write_file(DISK, folder / name, [f"{name} {step}".encode()]) for name in names], None

    content = commit.Content(step, 0, write, lambda notes: {"state.json": json.dumps(saved_state()).encode()})
    commit.commit(DISK, directory, content, lambda value, conclusion: conclusion([value]), 0)
    return directory / f"step_{step:08d}"


def stops(world: ControlGroup, asks: dict[int, int]) -> dict:
    """After which step this rank stops and why, and how long its votes took."""
    vote, seconds = StopVote(world), []
    for step in range(1, LAST_STEP + 1):
        if world.rank == 1 and step == SLOW_STEP:
            time.sleep(SLOW_SECONDS)
        own = f"rank {world.rank}" if step >= asks.get(world.rank, LAST_STEP + 1) else None
        began = time.monotonic()
        reason = vote.reason(own, at_once=step == LAST_STEP)
        seconds.append(time.monotonic() - began)
        if reason:
            return {"step": step, "reason": reason, "seconds": seconds}
    return {"step": None, "reason": None, "seconds": seconds}


def arrives(world: ControlGroup, step: int) -> tuple[bool, float]:
    began = time.monotonic()
    return StopVote(world).all_arrive(step), time.monotonic() - began


def waits_for_main(world: ControlGroup, late: float) -> bool:
    time.sleep(1.0 if world.is_main else 0.0)
    return world.all_arrive(f"late by {late}", late)


def fails() -> None:
    raise DataError("of rank 0")


def on_main_fails(world: ControlGroup) -> str:
    try:
        world.on_main(fails)
    except DataError as error:
        return str(error)
    return ""


def problems(world: ControlGroup, folder: Path, case: str) -> list[str]:
    """Those that the ranks find together. case: what was done to the checkpoint, see `main`."""
    seen = folder / ("elsewhere" if case == "two folders" and world.rank == 2 else case) / "step_00000040"
    return CheckpointSelector(seen.parent, {}, world, print, DISK).problems(seen)


def unshared(world: ControlGroup, folder: Path) -> str:
    """What check_shared says where `folder` of rank 2 is another one."""
    room.PATIENCE_SECONDS = 0.3
    try:
        room.check_shared(world, folder)
    except StorageError as error:
        return str(error)
    return ""


def rank(number: int, port: int, folder: Path) -> None:
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_RANK": str(number % 2), "GLOO_SOCKET_IFNAME": "lo"}  # ranks 0 and 2 are the first of hosts
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = ControlGroup()
    found = {
        "scattered": world.scatter(["a", "b", "c"] if world.is_main else None),
        "concluded": world.conclude(10 + number, list),
        "exchanged": world.gather_scatter(5 * number, list),
        "broadcast": world.broadcast(number),
        "failed": on_main_fails(world),
        "stops": stops(world, ASKS),
        "stops at the end": stops(world, {2: LAST_STEP}),
        "goes on": stops(world, {}),
        "late": [waits_for_main(world, late) for late in (0.1, 60.0)],
        "arrives": [arrives(world, step) for step in (1, 2) if step == 1 or number < 2],
    }
    for case in ("good", "damaged", "without a manifest", "two folders"):
        found[case] = problems(world, folder, case)
    found["shared"] = [unshared(world, folder), unshared(world, folder / ("elsewhere" if number == 2 else "good"))]
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.barrier()


def main() -> None:
    folder = Path(sys.argv[1])
    good = save(folder / "good", 40)
    for case in ("damaged", "without a manifest", "two folders"):
        shutil.copytree(good.parent, folder / case)
    save(folder / "elsewhere", 20).rename(folder / "elsewhere" / good.name)
    (folder / "damaged" / good.name / file_name(1)).write_text("x")
    (folder / "without a manifest" / good.name / "manifest.json").unlink()
    port = free_port()
    children = [fork(lambda number=number: rank(number, port, folder)) for number in range(SIZE)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * SIZE
    print(json.dumps([json.loads((folder / f"{number}.json").read_text()) for number in range(SIZE)]))


if __name__ == "__main__":
    main()
