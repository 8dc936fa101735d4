"""The 20 faults. All come from outside: signals, the disk, and files changed while nothing runs.

LIVE ones happen to a run that goes on; DAMAGE is done to a run that was killed between two saves (steps 13 to 14).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import toy
from loops import Loop
from processes import Job

START_SECONDS = 120  # the longest until a run's first step, on a busy machine
SECOND_SAVE = 2 * toy.SAVE_EVERY


class NotReached(Exception):
    """The run ended before the place where it was to be hurt."""


# Waiting for a place


def wait_for_step(job: Job, loop: Loop, directory: Path, step: int) -> None:
    _poll(job, lambda: max(loop.losses(directory), default=0) >= step, pause=0.002)


def _wait_for_save(job: Job, loop: Loop, directory: Path, part: float) -> None:
    """Until the second save has written `part` of what the first one has; 0: until its folder is there."""
    wait_for_step(job, loop, directory, toy.SAVE_EVERY + 2)
    job.ranks()
    folder = directory / loop.checkpoints
    known = set(_folders(folder))
    wanted = part * _size(loop.found(directory)[-1])
    _poll(job, lambda: any(_size(path) >= wanted for path in set(_folders(folder)) - known), pause=0)


def _poll(job: Job, reached: Callable[[], bool], pause: float) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not reached():
        if job.ended or time.monotonic() > deadline:
            raise NotReached
        time.sleep(pause)


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir()]


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):  # renamed or removed meanwhile
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0


# Live


def kill_in_save(part: float, rank: int | None) -> Callable:
    """SIGKILL of one rank, or of everything when `rank` is None."""

    def injure(job: Job, loop: Loop, directory: Path) -> None:
        _wait_for_save(job, loop, directory, part)
        job.kill_all() if rank is None else job.send(signal.SIGKILL, rank)

    return injure


def kill_at(step: int, rank: int | None) -> Callable:
    def injure(job: Job, loop: Loop, directory: Path) -> None:
        wait_for_step(job, loop, directory, step)
        job.kill_all() if rank is None else job.send(signal.SIGKILL, rank)

    return injure


def send(number: int, target: str) -> Callable:
    """Right after the first save, so that some seconds of training are left to answer in."""

    def injure(job: Job, loop: Loop, directory: Path) -> None:
        wait_for_step(job, loop, directory, toy.SAVE_EVERY + 1)
        if target == "rank 1":
            job.send(number, 1)
        elif target == "launcher":
            os.kill(job.launcher.pid, number)
        else:  # the terminal's process group, as Ctrl-C; torchrun's workers are in it or get it from torchrun
            os.killpg(job.launcher.pid, number)

    return injure


def fill_disk(job: Job, loop: Loop, directory: Path) -> None:
    """A file beside the run takes all but half of a checkpoint's size. The run's folder is a file system of its own."""
    wait_for_step(job, loop, directory, toy.SAVE_EVERY + 2)
    half = _size(loop.found(directory)[-1]) // 2
    with open(directory.parent / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(directory).free - half)


def free_disk(directory: Path) -> None:
    (directory.parent / "ballast").unlink(missing_ok=True)


# At rest: each returns the name that a message about the damage would have to give


def truncate(loop: Loop, directory: Path) -> str:
    path = loop.found(directory)[-1] / loop.weights
    os.truncate(path, path.stat().st_size // 2)
    return path.name


def flip_weight(loop: Loop, directory: Path) -> str:
    return _flip(loop.found(directory)[-1] / loop.weights)


def flip_moment(loop: Loop, directory: Path) -> str:
    return _flip(loop.found(directory)[-1] / loop.optimizer)


def flip_generator(loop: Loop, directory: Path) -> str:
    """Where no generator's state is saved: the learning rate schedule's count of steps, in a pickle."""
    folder = loop.found(directory)[-1]
    if loop.generators.endswith(".safetensors"):
        return _flip_named(folder / loop.generators, "rng/")
    if loop.generators:
        return _flip(folder / loop.generators)
    path = folder / loop.weights
    content = path.read_bytes()
    return _flip(path, content.index(b"K", content.index(b"last_epoch") + len(b"last_epoch")) + 1)  # K: a small number


def delete(loop: Loop, directory: Path) -> str:
    path = loop.found(directory)[-1] / loop.optimizer
    path.unlink()
    return path.name


def empty_position(loop: Loop, directory: Path) -> str:
    path = loop.found(directory)[-1] / loop.position
    os.truncate(path, 0)
    return path.name


def empty_folder(loop: Loop, directory: Path) -> str:
    """As a kill leaves it on a file system that had made the folder durable and not yet the files."""
    folder = loop.found(directory)[-1]
    for path in folder.iterdir():
        path.unlink()
    return folder.name


def swap(loop: Loop, directory: Path) -> str:
    """As a copy of a run's folder does that was made while the run went on. No good checkpoint is left, so refusing to
    start ("does not start") is the right answer to this one."""
    older, newest = (folder / loop.weights for folder in loop.found(directory)[-2:])
    aside = newest.with_name("aside")
    newest.rename(aside)
    older.rename(newest)
    aside.rename(older)
    return newest.name


def nothing(loop: Loop, directory: Path) -> str:
    return ""


def _flip(path: Path, offset: int | None = None) -> str:
    """The highest bit of a byte; in the middle of the file that is the sign of an fp32 number."""
    content = bytearray(path.read_bytes())
    position = len(content) // 2 // 4 * 4 + 3 if offset is None else offset
    content[position] ^= 0x80
    path.write_bytes(content)
    return path.name


def _flip_named(path: Path, prefix: str) -> str:
    """In the middle of the first tensor whose name begins so, by a safetensors file's header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begin, end = next(entry["data_offsets"] for name, entry in header.items() if name.startswith(prefix))
    return _flip(path, 8 + length + (begin + end) // 2)


LIVE: dict[str, Callable] = {
    "SIGKILL of rank 1 as a save begins": kill_in_save(0, 1),
    "SIGKILL of all at a fifth of a save": kill_in_save(0.2, None),
    "SIGKILL of all at two thirds of a save": kill_in_save(0.67, None),
    "SIGKILL of all right after a save": kill_at(SECOND_SAVE + 1, None),
    "SIGKILL of rank 1 between saves": kill_at(SECOND_SAVE + 3, 1),
    "SIGTERM to the launcher": send(signal.SIGTERM, "launcher"),
    "SIGTERM to rank 1": send(signal.SIGTERM, "rank 1"),
    "SIGINT to the process group": send(signal.SIGINT, "group"),
    "SIGUSR1 to rank 1": send(signal.SIGUSR1, "rank 1"),
    "SIGSTOP of rank 1": send(signal.SIGSTOP, "rank 1"),
    "full disk during a save": fill_disk,
}
DAMAGE: dict[str, Callable] = {
    "weights file truncated": truncate,
    "bit flip in the weights": flip_weight,
    "bit flip in the optimizer's state": flip_moment,
    "bit flip in a generator's state": flip_generator,
    "optimizer file deleted": delete,
    "file with the position empty": empty_position,
    "newest checkpoint an empty folder": empty_folder,
    "weights of two checkpoints swapped": swap,
    "restart with 1 process": nothing,
}
assert len(LIVE) + len(DAMAGE) == 20
ONE_PROCESS, FULL_DISK = "restart with 1 process", "full disk during a save"
