"""Checkpoint manager of the training loop: find, load, save in the background, roll back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from samecurve.checkpoint import commit
from samecurve.checkpoint.manifest import check_files, folder_name, list_checkpoints
from samecurve.checkpoint.resume import FORMAT, CheckpointSelector, comparable, read_state, state_problems
from samecurve.checkpoint.snapshot import Snapshot, Taken, generators_of, restore
from samecurve.errors import CheckpointError, NumericError, StorageError
from samecurve.specs.tasks import BETTER
from samecurve.storage.atomic import json_values, utc_timestamp, write_json
from samecurve.storage.fault_points import fault_point
from samecurve.storage.filesystem import FileSystem, LocalFileSystem
from samecurve.storage.records import is_number

if TYPE_CHECKING:
    from samecurve.checkpoint.mirror import Mirror
    from samecurve.config.schema import Recipe
    from samecurve.distributed.control_group import ControlGroup
    from samecurve.interfaces.engine import Engine

MOST_FAILURES = 3


@dataclass(frozen=True)
class TrainProgress:
    """Position of a run, as saved in a checkpoint.

    Attributes:
        step: optimizer steps, including skipped ones.
        updates: optimizer steps that were applied.
        samples: rows consumed.
        meter: the value of `Meter.state`.
        record: the step's line of metrics.jsonl.
        anchor: what the data loader needs besides `samples` to resume, see `StepBatches.anchor`.
        stopping: the value of `EarlyStopping.state`.
    """

    step: int = 0
    updates: int = 0
    samples: int = 0
    meter: dict = field(default_factory=dict)
    record: dict = field(default_factory=dict)
    anchor: dict = field(default_factory=dict)
    stopping: dict = field(default_factory=dict)


@dataclass
class _Save:
    """A save that was started. thread: None for a synchronous save. error: the reason why it was not committed."""

    step: int
    began: float
    thread: threading.Thread | None = None
    error: Exception | None = None


class RunFolder(Protocol):
    """The part of a run directory that checkpoints need."""

    checkpoints: Path

    def sync_metrics(self) -> None:
        """Make the lines of metrics.jsonl durable."""


class Checkpoints:
    """Finds, loads, saves and rotates the checkpoints of one run.

    Args:
        facts: the result of `run.metadata.resume_identity`: they decide whether a run may resume.
        log: prints one line (on rank 0 only).
        busy: called for each tensor, to report progress of a long save or load to the watchdog.
        background: continue training while a checkpoint is written; costs a copy of this rank's part in host memory.

    Attributes:
        resumed_from: the checkpoint that `find` selected; None if there is none.
        mirror: learns of each commit; None on other ranks than 0, and without checkpoint.mirror.
        resumable_at: the position that the engine's state is of; None during a step, whose update may be half done.
    """

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        facts: dict,
        world: ControlGroup,
        log: Callable[[str], None],
        busy: Callable[[], None] = lambda: None,
        background: bool = True,
    ):
        self._run, self._facts, self._world, self._log, self._busy = run, json_values(facts), world, log, busy
        self._recipe, self._settings, self._background = recipe, recipe.checkpoint, background
        self._files = LocalFileSystem(busy)
        self._selector = CheckpointSelector(run.checkpoints, self._facts, world, log, self._files)
        self._conclude = world.new().conclude  # a group of its own for the writing thread
        self._snapshot: Snapshot | None = None
        self._in_flight: _Save | None = None
        self._failures = 0  # in a row
        self._num_commits = 0
        self._tried_step = self._committed_step = 0
        self._metrics: dict = {}
        self._stall: dict = {}
        self.resumed_from: Path | None = None
        self.mirror: Mirror | None = None
        self.resumable_at: TrainProgress | None = None

    def find(self, resume: str) -> Path | None:
        """Select the checkpoint to resume from, see CheckpointSelector.select."""
        self.resumed_from = self._selector.select(resume)
        return self.resumed_from

    def num_bytes(self, engine: Engine) -> int:
        """Return the size of this rank's part of a checkpoint."""
        return Snapshot(engine).num_bytes

    def load(self, folder: Path, engine: Engine, generators: bool = True) -> TrainProgress:
        """Load a verified checkpoint into the engine. Collective.

        generators: restore the random generators too, or seed them anew if their layout has changed.
        Raises CheckpointError on all ranks if model and checkpoint differ, on one rank if its part cannot be read.
        """
        saved = comparable(self._world.on_main(lambda: read_state(folder)), self._facts)
        restore(folder, engine, saved, self._world, self._recipe.seed if generators else None, self._busy)
        return TrainProgress(**{key: saved[key] for key in TrainProgress.__dataclass_fields__ if key in saved})

    def roll_back(self, engine: Engine) -> TrainProgress | None:
        """Restore weights and optimizer from the newest good checkpoint; rows and step count are not rewound.

        Returns:
            The checkpoint's TrainProgress. None if there is no checkpoint yet: this is logged and nothing changes.
        """
        self.wait()
        # resumed_from may lie in another run's directory
        chosen = [*self._selector.candidates("auto"), *filter(None, [self.resumed_from])]
        folder = next((folder for folder in chosen if not self._selector.problems(folder)), None)
        if folder is None:
            self._log("loss spike: there is no checkpoint to roll back to yet, so training continues")
            return None
        self._log(f"loss spike: rolled back to the weights of {folder}; the rows since then are not read again")
        return self.load(folder, engine, generators=False)

    def load_best(self, engine: Engine) -> int:
        """Load the weights of the checkpoint with the best value of checkpoint.best, and return its step. Collective.

        Raises:
            CheckpointError: no checkpoint has a value, or the best one is damaged. Raised on all ranks.
        """
        self.wait()
        metric, folder = self._settings.best, self._run.checkpoints
        assert metric is not None  # a rule of the configuration
        best = self._world.on_main(lambda: find_best(self._files, folder, metric, self._facts))
        last = "set export.checkpoint=last to export the last step"
        if best is None:
            raise CheckpointError(f"{folder}: no checkpoint has {metric} (checkpoint.best); {last}")
        if problems := self._selector.problems(best):
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise CheckpointError(f"{best}: the best checkpoint by {metric} is damaged; {last}\n{listed}")
        self._log(f"exporting {best.name}, the best checkpoint by {metric}")
        return self.load(best, engine, generators=False).step

    def save(self, engine: Engine, position: TrainProgress, wait: bool = False) -> None:
        """Start to save this rank's part; without `background`, also wait until it is written. Collective.

        A failed save is logged and training continues. The third failure in a row raises StorageError on all ranks.

        Args:
            wait: no later save will follow, so retry until this one is committed or three have failed.
        """
        began = time.perf_counter()
        only_looks = not wait and self._is_second_look(position.step)
        committed = self.wait()
        while not (committed and only_looks):
            self._start(engine, position, began)
            if not wait and self._background:
                break
            committed = self.wait()
            if committed or not wait:
                break
        self._stall = {"save_stall_seconds": time.perf_counter() - began}

    def secure(self, engine: Engine, position: TrainProgress) -> None:
        """Ensure a committed checkpoint of exactly this position: the save in flight or a new one."""
        self.wait()
        if self._committed_step != position.step:
            self.save(engine, position, wait=True)

    def wait(self) -> bool:
        """Wait for the save in flight and return whether it was committed.

        Raises:
            StorageError: this save is the third in a row that failed.
            NumericError: a value to save is not finite, which no later step can repair.
        """
        save, self._in_flight = self._in_flight, None
        if save is None:
            return self._failures == 0
        if save.thread is not None:
            save.thread.join()
        if isinstance(save.error, NumericError):
            raise NumericError(f"{save.error}; this checkpoint was not saved, earlier ones are finite") from save.error
        if save.error is None:
            self._failures, self._committed_step = 0, save.step
            return True
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            raise StorageError(f"{self._failures} saves in a row failed; the last time: {save.error}") from save.error
        return False

    def due(self, step: int, is_last: bool) -> bool:
        """Whether to call `save` after `step`: every checkpoint.every_steps and after the last step.

        Also every_steps / 4 steps after a save was started, to check its result and retry if it failed.
        """
        every = self._settings.every_steps
        if not every:
            return False
        return step % every == 0 or is_last or self._is_second_look(step)

    def _is_second_look(self, step: int) -> bool:
        every = self._settings.every_steps
        soon = bool(step % every) and step - self._tried_step == max(1, every // 4)
        return soon and (self._in_flight is not None or self._failures > 0)

    def folder(self, position: TrainProgress) -> Path:
        """Return where the checkpoint of a position is, once it is committed."""
        return self._run.checkpoints / folder_name(position.step)

    def finished(self) -> dict:
        """Return the metrics of saves since the last call, {} without one.

        save_stall_seconds: how long `save` blocked training. save_seconds: how long it took until the commit.
        """
        metrics, self._metrics, self._stall = self._metrics | self._stall, {}, {}
        return metrics

    def _start(self, engine: Engine, position: TrainProgress, began: float) -> None:
        self._snapshot = self._snapshot or Snapshot(engine)
        taken = self._snapshot.take(copy=self._background)
        fault_point("save.staged")
        described = {"format": FORMAT, **asdict(position), "loss_scale": engine.loss_scale_state}
        described |= {"generators": generators_of(engine, self._world), "time": utc_timestamp(), **self._facts}
        # encoded now: the position shares dicts with the loop, which goes on while another thread writes
        state = json.dumps(json_values(described)).encode()
        save = self._in_flight = _Save(position.step, began)
        self._tried_step = position.step
        work = partial(self._commit, save, self._snapshot, taken, state)
        if not self._background:  # in this thread: its current CUDA device is the one of the live tensors
            work()
            return
        save.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        save.thread.start()

    def _commit(self, save: _Save, snapshot: Snapshot, taken: Taken, state: bytes) -> None:
        """Write and commit one save. An error is stored in `save.error`; `wait` raises it."""
        rank = self._world.rank

        def small_files(regions: list) -> dict[str, bytes]:
            self._run.sync_metrics()  # so that the metrics up to this step are as durable as the checkpoint
            return snapshot.small_files(state, regions)

        def write(folder: Path) -> tuple:
            return snapshot.write(self._files, folder, rank, taken, self._busy)

        content = commit.Content(save.step, sum(entry.nbytes for entry in taken[0]), write, small_files)
        try:
            commit.commit(self._files, self._run.checkpoints, content, self._conclude, rank)
            self._metrics = {"save_seconds": time.perf_counter() - save.began}
        except Exception as error:
            save.error = error
            self._log(f"the checkpoint of step {save.step} was not written: {error}")
        else:
            # the checkpoint that was resumed from may be written again, with an evaluation that was missing
            self._num_commits += self.resumed_from is None or folder_name(save.step) != self.resumed_from.name
            self._tidy()

    def _tidy(self) -> None:
        """Record the best checkpoint and remove old ones. Errors are only logged: the save itself has succeeded."""
        if not self._world.is_main:
            return
        try:
            metric = self._settings.best
            best = find_best(self._files, self._run.checkpoints, metric, self._facts) if metric else None
            # the one that is known to be good, until this session has written as many as are kept
            resumed_from = self.resumed_from if self._num_commits < self._settings.keep else None
            protected = {folder.name for folder in (resumed_from, best) if folder is not None}
            if self.mirror is not None:
                protected |= {self.mirror.uploading}
                self.mirror.offer()
            problem = commit.rotate(self._files, self._run.checkpoints, self._settings.keep, protected)
        except Exception as error:
            problem = str(error)
        if problem:
            self._log(f"could not remove all old checkpoints in {self._run.checkpoints}: {problem}")


def find_best(fs: FileSystem, directory: Path, metric: str, facts: dict) -> Path | None:
    """Find the good checkpoint with the best value of the metric; None if none has the metric. For rank 0.

    Values of another evaluation than that of `facts` (see Checkpoints) do not count.
    best.json in `directory` gets its name and the value.
    """
    values = {}
    for folder in list_checkpoints(fs, directory):
        # hashes state.json, which has the metric, but not the weights: this follows every save
        if check_files(fs, folder, small_only=True) or state_problems(folder):
            continue
        value = comparable(read_state(folder), facts)["record"].get(metric)
        if value is not None and is_number(value):
            values[folder] = value
    if not values:
        return None
    choose = min if BETTER[metric] == "lower" else max  # of equal ones the first
    best = choose(reversed(values), key=values.__getitem__)
    write_json(directory / "best.json", {"checkpoint": best.name, metric: values[best]})
    return best
