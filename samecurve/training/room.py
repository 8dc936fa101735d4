"""The space that a run needs on the disk of output_dir, beside what is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from samecurve.checkpoint.commit import SPARE_BYTES
from samecurve.errors import StorageError
from samecurve.metrics.meter import GIB
from samecurve.storage.filesystem import UNKNOWN_BYTES

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe


def missing_room(recipe: Recipe, checkpoint_bytes: int, export_bytes: int, num_kept: int, free: int) -> str:
    """Return why the run's checkpoints and its export will not fit on the disk together, with the fix; "" if they do.

    Args:
        recipe: says how many checkpoints are kept.
        checkpoint_bytes, export_bytes: the size of one.
        num_kept: checkpoints that are there, which make room for later ones.
        free: bytes.
    """
    settings = recipe.checkpoint
    most = settings.keep + 1 + bool(settings.best) if settings.every_steps else 1
    most = min(most, recipe.steps)
    # at least one, because an old checkpoint is removed only after the next one has been written
    needed = max(most - num_kept, 1) * checkpoint_bytes + export_bytes
    if needed <= free:
        return ""
    return (
        f"{free / GIB:.3g} GiB are free, but up to {most} checkpoints of {checkpoint_bytes / GIB:.3g} GiB "
        f"(checkpoint.keep: {settings.keep}, and one that is being written) and an export of "
        f"{export_bytes / GIB:.3g} GiB will be there together; free {(needed - free) / GIB:.3g} GiB, lower "
        "checkpoint.keep, or set output_dir to another disk"
    )


def check_room(recipe: Recipe, checkpoint_bytes: int, export_bytes: int, num_kept: int, free: int) -> str:
    """Return a line to print where not all checkpoints will fit, or where nobody knows. See `missing_room`.

    Raises StorageError where not even one checkpoint and the export fit: the run would end without a model.
    """
    if free == UNKNOWN_BYTES:
        sizes = f"a checkpoint needs {checkpoint_bytes / GIB:.3g} GiB and the export {export_bytes / GIB:.3g} GiB"
        return f"{recipe.output_dir}: the file system does not say how much space is free; {sizes}"
    usable = max(free - SPARE_BYTES, 0)
    missing = missing_room(recipe, checkpoint_bytes, export_bytes, num_kept, usable)
    if not missing:
        return ""
    sizes = (checkpoint_bytes if recipe.checkpoint.every_steps else 0, export_bytes)
    # a run that goes on removes a checkpoint before it exports
    least = max(sizes) if num_kept else sum(sizes)
    if usable < least:
        raise StorageError(f"{Path(recipe.output_dir)}: {missing}")
    return f"{recipe.output_dir}: {missing}"
