"""Checkpoints as the training loop uses them: find, load, save beside training, go back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .. import rng
from ..errors import CheckpointError, StorageError
from ..faults import reach
from ..records import now, plain, write_json
from . import commit, files
from .changes import changes, refusals
from .filesystem import LocalFileSystem
from .snapshot import Snapshot
from .verify import candidates, check, file_name, manifest_digest

if TYPE_CHECKING:
    from ..engines.base import Engine
    from ..rundir import RunDirectory
    from ..world import World

FORMAT = 1
STATE = "state.json"
MOST_FAILURES = 3


@dataclass(frozen=True)
class Position:
    """Where a run is. step: optimizer steps, skipped ones included. updates: those applied. samples: rows consumed.

    meter: `Meter.state()`. record: the step's line of metrics.jsonl.
    """

    step: int = 0
    updates: int = 0
    samples: int = 0
    meter: dict = field(default_factory=dict)
    record: dict = field(default_factory=dict)


class Checkpoints:
    """facts: what decides whether a run may go on: `recipe`, `model`, `data`, `strategy`, `world_size`, `versions`.

    say: prints a line (on rank 0 only). busy: called for each tensor, which says that a long save or load gets on.
    """

    def __init__(
        self,
        run: RunDirectory,
        facts: dict,
        world: World,
        say: Callable[[str], None],
        busy: Callable[[], None] = lambda: None,
    ):
        self._run, self._facts, self._world, self._say, self._busy = run, plain(facts), world, say, busy
        self._settings = facts["recipe"]["checkpoint"]
        self._files = LocalFileSystem()
        self._exchange = type(world)().exchange  # a group of the thread's own
        self._snapshot: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._failures = 0
        self._metrics: dict = {}
        self._started_step = self._committed_step = 0
        self._resumed_from: Path | None = None

    # Going on

    def find(self, resume: str) -> Path | None:
        """The checkpoint to go on from, every byte of it checked; None for a fresh start.

        resume: "auto", "none", or a folder. Tells why others were rejected. Raises CheckpointError, on all ranks, when
        there are only bad ones, or when the run may not go on from the good one.
        """
        rejected: list[str] = []
        for folder in self._candidates(resume):
            problems = self._problems(folder)
            if not problems:
                self._check_changes(folder)
                self._resumed_from = folder
                return folder
            text = "\n".join(f"  {folder.name}/{problem}" for problem in problems)
            self._say(f"a checkpoint in {folder.parent} is not used:\n{text}")
            rejected.append(text)
        if rejected:
            raise CheckpointError(
                f"{self._run.checkpoints}: no checkpoint can be used; choose one by hand (--resume FOLDER), or begin "
                "again and move these aside (--start_over)\n" + "\n".join(rejected)
            )
        return None

    def load(self, folder: Path, engine: Engine, generators: bool = True) -> Position:
        """Fill the engine from a checked checkpoint. generators: go on with dropout's random numbers too."""
        reach("load.read")
        saved = self._state(folder)
        reader = files.Reader(folder)
        reader.check_names(engine.shapes)
        with torch.no_grad():
            for held, kind, tensor in engine.state.visit(writing=True):
                self._busy()
                tensor.copy_(reader.read(held.name, kind, held.start, held.stop))
            engine.state.finish(saved["updates"])
        engine.loss_scale_state = saved["loss_scale"]
        if generators and saved["generators"] == self._generators(engine):
            names = rng.capture(engine.device)
            rng.restore({name: reader.tensor(self._world.rank, f"rng/{name}") for name in names}, engine.device)
        elif generators:
            rng.reseed(self._facts["recipe"]["seed"], saved["step"], self._world.rank)
        reach("load.done")
        return Position(**{key: saved[key] for key in Position.__dataclass_fields__})

    def roll_back(self, engine: Engine) -> int:
        """Weights and optimizer of the newest checkpoint; rows and steps go on. Returns its number of updates."""
        self.wait()
        folder = next((folder for folder in self._candidates("auto") if not self._problems(folder)), None)
        if folder is None:
            raise CheckpointError(f"{self._run.checkpoints}: there is no checkpoint to roll back to yet")
        self._say(f"back to the weights of {folder}; the rows since then are not seen again")
        return self.load(folder, engine, generators=False).updates

    # Saving

    def save(self, engine: Engine, position: Position, wait: bool = False) -> dict:
        """Copy this rank's part and write it beside training. Returns what metrics say: `save_stall_seconds`.

        A failed save is told and training goes on; the third in a row raises StorageError on all ranks. wait: there is
        no later save, so this one is tried until it is committed or three have failed.
        """
        began = time.perf_counter()
        self.wait()
        self._run.sync_metrics()
        while True:
            self._start(engine, position, began)
            if not wait and self._settings["background"]:
                break
            committed = self.wait()
            if committed or not wait:
                break
        return {"save_stall_seconds": time.perf_counter() - began}

    def secure(self, engine: Engine, position: Position) -> None:
        """A committed checkpoint of this very position: the one in flight, or a new one."""
        self.wait()
        if self._committed_step != position.step:
            self.save(engine, position, wait=True)

    def wait(self) -> bool:
        """For the save in flight: whether it was committed. Raises StorageError when it is the third that failed."""
        if self._thread is None:
            return True
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        self._failures = self._failures + 1 if error else 0
        self._committed_step = self._committed_step if error else self._started_step
        if self._failures >= MOST_FAILURES:
            raise StorageError(f"{self._failures} saves in a row failed; the last time: {error}") from error
        return error is None

    def finished(self) -> dict:
        """`save_seconds` of a save that was committed since the last call."""
        found, self._metrics = self._metrics, {}
        return found

    def _start(self, engine: Engine, position: Position, began: float) -> None:
        self._snapshot = self._snapshot or Snapshot(engine)
        entries, values = self._snapshot.take(copy=self._settings["background"])
        reach("save.staged")
        papers = {STATE: json.dumps(plain(self._describe(engine, position))).encode()}
        shapes = {name: list(shape) for name, shape in engine.shapes.items()}
        ranges, rank = self._snapshot.ranges, self._world.rank

        def write(folder: Path) -> tuple[list, list]:
            chunks = self._seen(files.chunks(entries, values))
            record = commit.write_file(self._files, folder / file_name(rank), chunks)
            return [record], ranges

        def job() -> None:
            try:
                planned = sum(entry.nbytes for entry in entries)
                commit.commit(
                    self._files,
                    self._run.checkpoints,
                    position.step,
                    planned,
                    write,
                    lambda notes: papers | {files.INDEX: files.index(shapes, notes)},
                    self._exchange,
                    rank,
                )
                self._metrics = {"save_seconds": time.perf_counter() - began}
            except Exception as error:
                self._error = error
                self._say(f"the checkpoint after step {position.step} was not written: {error}")
            else:
                self._tidy()

        self._started_step = position.step
        self._thread = threading.Thread(target=job, name="checkpoint", daemon=True)
        self._thread.start()

    def _describe(self, engine: Engine, position: Position) -> dict:
        state = {"format": FORMAT, **asdict(position), "loss_scale": engine.loss_scale_state}
        return state | {"generators": self._generators(engine), "time": now(), **self._facts}

    def _generators(self, engine: Engine) -> dict:
        """Where random numbers come from. Where it is the same, each rank goes on with its own."""
        return {"ranks": self._world.size, "data_parallel_size": engine.shard[1], "device": engine.device.type}

    def _tidy(self) -> None:
        """Remember the best, remove what is too old. The save is good whatever happens here, so that is only told."""
        if not self._world.is_main:
            return
        try:
            best = self._find_best() if self._settings["best"] else None
            protected = {folder.name for folder in (self._resumed_from, best) if folder is not None}
            problem = commit.rotate(self._files, self._run.checkpoints, self._settings["keep"], protected)
        except Exception as error:
            problem = str(error)
        if problem:
            self._say(f"old checkpoints in {self._run.checkpoints} were not all removed: {problem}")

    def _find_best(self) -> Path | None:
        metric, values = self._settings["best"], {}
        for folder in candidates(self._files, self._run.checkpoints):
            damaged = check(self._files, folder, shard=None)
            value = None if damaged else self._state(folder)["record"].get(metric)
            if value is not None:
                values[folder] = value
        if not values:
            return None
        best = min(values, key=values.__getitem__)
        write_json(self._run.checkpoints / "best.json", {"checkpoint": best.name, metric: values[best]})
        return best

    def _seen(self, chunks: Iterator) -> Iterator:
        for chunk in chunks:
            self._busy()
            yield chunk

    # Looking

    def _candidates(self, resume: str) -> list[Path]:
        """As rank 0 sees them, newest first: all ranks have to look at the same."""
        if resume not in ("auto", "none"):
            return [Path(resume)]
        own = candidates(self._files, self._run.checkpoints) if resume == "auto" and self._world.is_main else []
        return self._world.exchange(own)[0]

    def _problems(self, folder: Path) -> list[str]:
        """Of all ranks: each reads the papers and its share of the files."""
        reach("load.verify")
        problems = [str(p) for p in check(self._files, folder, (self._world.rank, self._world.size))]
        seen = None if problems else manifest_digest(self._files, folder)
        of_all = self._world.exchange((problems, seen))
        found = sorted({problem for others, _ in of_all for problem in others})
        if not found and len({digest for _, digest in of_all}) > 1:
            found = ["ranks read different manifest.json; output_dir has to be the same folder on all machines"]
        return found

    def _check_changes(self, folder: Path) -> None:
        saved = self._state(folder)
        if saved.get("format") != FORMAT:
            raise CheckpointError(f"{folder / STATE}: format {saved.get('format')}, but this version reads {FORMAT}")
        refused = refusals(saved, self._facts)
        if refused:
            raise CheckpointError(
                f"{folder}: the run may not go on from it, because this may not change:\n"
                + "\n".join(f"  {text}" for text in refused)
                + "\nundo it, choose another output_dir, or begin again (--start_over)"
            )
        changed = changes(saved, self._facts)
        self._say("\n".join([f"going on from {folder}", *(f"  changed: {text}" for text in changed)]))

    def _state(self, folder: Path) -> dict:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
