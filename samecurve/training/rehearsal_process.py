"""Process of a rehearsal: what rehearsal.py starts on each rank. Reads its assignment from standard input."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from samecurve.checkpoint.manager import TrainProgress
from samecurve.checkpoint.manifest import list_checkpoints
from samecurve.checkpoint.resume import read_state
from samecurve.config import own_code
from samecurve.distributed.control_group import ControlGroup
from samecurve.engines import factory
from samecurve.errors import NumericError, SamecurveError, StorageError
from samecurve.metrics.console import Progress
from samecurve.metrics.meter import peak_memory_bytes
from samecurve.optim.schedule import learning_rate
from samecurve.run import lifecycle
from samecurve.run.run_directory import RunDirectory
from samecurve.specs.gpus import GIB
from samecurve.storage.atomic import write_json
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.strategy.preflight import existing_parent
from samecurve.training import room, startup
from samecurve.training.rehearsal import NOTHING_LEFT, REPORT, Assignment, DoesNotFit, RehearsedStage
from samecurve.training.session import Context, Session

if TYPE_CHECKING:
    from samecurve.config.schema import Recipe

MOST_OVERFLOWS = 20  # steps that fp16's loss scale may take to come down to the gradients

_STEP = "lower {sizes}, set memory.activation_checkpointing: full, or choose a strategy that shards or offloads more"
REMEDIES = {
    "start": "choose a strategy that shards or offloads more, or a smaller model",
    "first step": _STEP,
    "next step": _STEP,
    "evaluation": "lower {sizes}: an evaluation reads as many rows at once as a step",
    "checkpoint": "set checkpoint.background: false, which writes without a copy in host memory",
    "export": "rank 0 needs one weight file of up to 4 GB in host memory, and export.verify (found {export.verify}) "
    "the whole model; lower that, or set export.enabled: false",
}
WRITING = ("checkpoint", "export")


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was full: also that of cuBLAS, NCCL or pinned pages, whose errors are of other classes."""
    # on a CPU, torch raises a plain RuntimeError where an allocation fails
    signs = "out of memory", "alloc_failed", "can't allocate memory"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error).lower() for sign in signs)


class StageMeter:
    """Measures stages and gathers the measurements of all ranks."""

    def __init__(self, recipe: Recipe, device: torch.device, world: ControlGroup):
        self._recipe, self._device, self._world = recipe, device, world
        self._folder = Path(recipe.output_dir)
        self.done: list[RehearsedStage] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the body, a stage of REMEDIES. Collective.

        Raises:
            DoesNotFit: the body ran out of memory, or exceeded memory.limit_gib on any rank.
            StorageError: that of the body, with the remedy where it writes.
        """
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # elsewhere than on Linux: the peak stays that of the whole process so far
                Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
        disk, before = LocalFileSystem().free_bytes(self._folder.parent), self._written()
        began = time.perf_counter()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            first = (str(error).splitlines() or ["out of memory"])[0]
            raise DoesNotFit(f"{name}: {first}\n{self._remedy(name)}") from error
        except StorageError as error:
            if name not in WRITING:
                raise
            raise StorageError(
                f"{name}: {error}\nthe run would fail there too; free some space, correct the permissions, or set "
                "output_dir to another disk"
            ) from error
        seconds = time.perf_counter() - began
        free_bytes = torch.cuda.mem_get_info(self._device)[0] if on_gpu else psutil.virtual_memory().available
        own = (peak_memory_bytes(self._device), free_bytes, self._written() - before, disk)
        peaks, free, written, disks = zip(*self._world.conclude(own, list), strict=True)
        largest = max(peaks)
        # both disk sizes are rank 0's: it measures the folders of all ranks, and writes to them last
        self.done.append(RehearsedStage(name, seconds, largest, peaks.index(largest), min(free), written[0], disks[0]))
        limit = self._recipe.memory.limit_gib
        if limit is not None and largest > limit * GIB:
            raise DoesNotFit(
                f"{name}: rank {peaks.index(largest)} reached {largest / GIB:.3f} GiB, but memory.limit_gib is "
                f"{limit:g}\n{self._remedy(name)}"
            )

    def _written(self) -> int:
        folders = [self._folder / "checkpoints", self._folder / "model"] if self._world.is_main else []
        return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())

    def _remedy(self, name: str) -> str:
        batch = self._recipe.batch
        sizes = f"batch.sequence_length (found {batch.sequence_length})"
        if batch.micro_batch_size > 1:
            sizes = f"batch.micro_batch_size (found {batch.micro_batch_size}) or {sizes}"
        return REMEDIES[name].format(sizes=sizes, export=self._recipe.export)


def main() -> int:
    """Rehearse and return the exit code of this process. The reason of a failure is in the folder's status.json."""
    assignment: Assignment = pickle.load(sys.stdin.buffer)
    plan = assignment.plan
    for path, folders in assignment.own_code.items():
        own_code.allow([path], folders)
    recipe = plan.recipe
    run = RunDirectory(recipe.output_dir, os.environ.get("RANK", "0") == "0")
    try:
        # "torchrun" makes this process watch the rank that started it, and end with it (signals.StopRequest)
        with lifecycle.supervised(run, "torchrun", recipe.watchdog.timeout_seconds) as watch:
            accelerator = factory.build_accelerator(plan)
            progress = Progress(recipe.steps, recipe.logging.every_steps, enabled=False)
            context = Context(plan, accelerator, run, watch, ControlGroup(), progress)
            stages = _rehearse(context, assignment.checkpoints)
            if context.world.is_main:
                write_json(run.path / REPORT, {"stages": stages})
        context.world.conclude(None, len)  # all have written their last file, and rank 0's parent removes them
    except SamecurveError as error:
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1
    return 0 if stages else NOTHING_LEFT


def _rehearse(context: Context, checkpoints: Path) -> list[RehearsedStage]:
    """Go through all stages. checkpoints: where the run's own checkpoints are."""
    run = context.run
    stage = StageMeter(context.recipe, context.accelerator.device, context.world)
    with stage("start"):
        own, run.checkpoints = run.checkpoints, checkpoints
        context, built, saves = startup.prepare(context)
        recipe = context.recipe
        num_kept = len(list_checkpoints(LocalFileSystem(), checkpoints)) if saves.resumed_from else 0
        run.checkpoints = own  # to which the rehearsal writes
        if saves.resumed_from and read_state(saves.resumed_from)["step"] >= recipe.steps:
            return []
        engine = startup.build_engine(context, built)
        start = startup.restore(context, engine, saves)
        session = startup.open_run(context, built, engine, saves, start)
    with stage("first step"):
        updates = _update(session, start.updates)
    with stage("next step"):  # the first one allocates the optimizer's state last, so only now all is there at once
        updates = _update(session, updates)
    if session.validation and recipe.evaluate.every_steps:
        with stage("evaluation"):
            context.watch.phase("evaluate", start.step)
            session.validation.metrics(engine, built.task)
    with stage("checkpoint"):
        context.watch.phase("save", start.step)
        position = TrainProgress(start.step, updates, start.samples, session.meter.state, {}, session.batches.anchor)
        saves.save(engine, position, wait=True)
    if recipe.export.enabled:
        with stage("export"):
            session.export()
    check_room(recipe, checkpoints, stage.done, num_kept)
    return stage.done


def _update(session: Session, updates: int) -> int:
    """Run a step on the longest rows, again while fp16's loss scale is too large. Returns the number of updates."""
    recipe, engine, start = session.context.recipe, session.engine, session.start.step
    for _ in range(MOST_OVERFLOWS):
        session.context.watch.phase("step", start + 1)
        result = engine.step(session.batches.longest(), learning_rate(recipe, min(updates + 1, recipe.steps)))
        if result.refused:
            raise NumericError(f"first step: {result.refused}")
        if result.applied:
            return updates + 1
    return updates


def check_room(recipe: Recipe, checkpoints: Path, stages: list[RehearsedStage], num_kept: int) -> None:
    """Raise StorageError if the run's checkpoints and its export will not fit on their disks.

    checkpoints: where the run's own ones are, as opposed to the rehearsal's.
    """
    written = {stage.name: stage.written_bytes for stage in stages}
    run = recipe.model_copy(update={"output_dir": str(Path(recipe.output_dir).parent)})
    needs = room.needs(run, checkpoints, written["checkpoint"], written.get("export", 0), num_kept)
    disk = existing_parent(Path(recipe.output_dir)).stat().st_dev
    for group in room.by_disk(needs):
        folder = existing_parent(group[0].folder)
        # on its own disk the rehearsal has written since
        free = stages[0].disk_bytes if folder.stat().st_dev == disk else LocalFileSystem().free_bytes(folder)
        if missing := room.missing_room(group, free):
            raise StorageError(missing)
