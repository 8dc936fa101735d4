"""What a run needs of its disks before it trains: one folder for all hosts, and space."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from samecurve.checkpoint.commit import SPARE_BYTES
from samecurve.errors import StorageError
from samecurve.specs.gpus import GIB
from samecurve.storage.atomic import storage_errors
from samecurve.storage.cache import cache_folder
from samecurve.storage.filesystem import UNKNOWN_BYTES, appears
from samecurve.strategy.preflight import existing_parent

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe
    from samecurve.distributed.control_group import ControlGroup

PATIENCE_SECONDS = 40.0


def check_shared(world: ControlGroup, folder: Path) -> None:
    """Raise StorageError on all ranks if one does not see what rank 0 writes into the run directory. Collective.

    A rank on another host would write its part of a checkpoint where nobody reads it.
    """
    if world.size == 1:
        return
    mark = folder / f".shared-{world.broadcast(uuid.uuid4().hex[:8])}"

    def make() -> None:
        with storage_errors(mark):
            mark.touch()

    world.on_main(make)
    seen = appears(mark, PATIENCE_SECONDS)
    blind = world.conclude("" if seen else socket.gethostname(), lambda hosts: sorted({*hosts} - {""}))
    if world.is_main:
        mark.unlink(missing_ok=True)
    if blind:
        where = f"{', '.join(blind[:3])}{f' and {len(blind) - 3} more' if blind[3:] else ''}"
        raise StorageError(
            f"output_dir: what rank 0 writes into {folder.absolute()} is not seen on {where}; set output_dir to a "
            "folder that all hosts mount, or mount it there"
        )


class Need(NamedTuple):
    """What a run will write into a folder: `most` bytes at a time, and at least `least`, or it ends without a model."""

    folder: Path
    what: str
    most: int
    least: int


def needs(recipe: Recipe, checkpoints: Path, checkpoint_bytes: int, export_bytes: int, num_kept: int) -> list[Need]:
    """List what a run will write.

    Args:
        recipe: says how many checkpoints are kept.
        checkpoints: the folder for them, which may be a link to another disk.
        checkpoint_bytes, export_bytes: the size of one.
        num_kept: checkpoints that are there, which make room for later ones.
    """
    settings = recipe.checkpoint
    num_most = settings.keep + 1 + bool(settings.best) if settings.every_steps else 1
    num_most = min(num_most, recipe.steps)
    # at least one, because an old checkpoint is removed only after the next one has been written
    most = max(num_most - num_kept, 1) * checkpoint_bytes
    counts = f"up to {num_most} checkpoints of {checkpoint_bytes / GIB:.3g} GiB (checkpoint.keep: {settings.keep}, and "
    least = checkpoint_bytes if settings.every_steps else 0
    listed = [Need(checkpoints, f"{counts}one that is being written)", most, least)]
    export = f"an export of {export_bytes / GIB:.3g} GiB"
    listed += [Need(Path(recipe.output_dir), export, export_bytes, export_bytes)] if export_bytes else []
    if recipe.data.streaming:  # a text of this size has about as many bytes of tokens
        size = int(recipe.data.shuffle_buffer_mib * 2**20)
        number = 2 * len(recipe.data.sources())
        blocks = f"{number} blocks of {size / GIB:.3g} GiB of the stream (data.shuffle_buffer_mib)"
        listed.append(Need(cache_folder(recipe.data.cache_dir), blocks, number * size, 0))
    return listed


def by_disk(needs: list[Need]) -> list[list[Need]]:
    """Group what is written by the file system that it goes to."""
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(existing_parent(need.folder).stat().st_dev, []).append(need)
    return list(disks.values())


def missing_room(needs: list[Need], free: int) -> str:
    """Return why what goes to one disk will not fit on it together, with the fix; "" if it does. free: bytes."""
    needed = sum(need.most for need in needs)
    if needed <= free:
        return ""
    names = " and ".join(need.what for need in needs)
    return (
        f"{needs[0].folder}: {free / GIB:.3g} GiB are free, but {names} will be there together; free "
        f"{(needed - free) / GIB:.3g} GiB, keep fewer checkpoints (checkpoint.keep, 2 at least), or set output_dir to "
        "another disk"
    )


def check_room(needs: list[Need], num_kept: int, free_bytes: Callable[[Path], int]) -> str:
    """Return lines to print about disks on which not all will fit, or of which nobody knows. See `missing_room`.

    Raises StorageError where not even one checkpoint and the export fit: the run would end without a model.
    """
    lines = []
    for group in by_disk(needs):
        free = free_bytes(existing_parent(group[0].folder))
        if free == UNKNOWN_BYTES:
            names = " and ".join(need.what for need in group)
            lines.append(f"{group[0].folder}: the file system does not say how much space is free for {names}")
            continue
        usable = max(free - SPARE_BYTES, 0)
        line = missing_room(group, usable)
        sizes = [need.least for need in group]
        # a run that goes on removes a checkpoint before it exports
        if line and usable < (max(sizes) if num_kept else sum(sizes)):
            raise StorageError(line)
        lines += [line] if line else []
    return "\n".join(lines)
