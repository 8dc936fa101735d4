"""Evaluation of a run's checkpoints while it trains, in a process of its own, for `evaluate --watch`."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from samecurve.bench.evaluation import evaluate_folder
from samecurve.bench.jobs import unwinding
from samecurve.checkpoint.manifest import MARKER, check_files, list_checkpoints, step_of
from samecurve.checkpoint.resume import read_state
from samecurve.config.schema import Recipe
from samecurve.errors import ConfigurationError, SamecurveError
from samecurve.export.convert import from_checkpoint
from samecurve.export.model_card import ExportInfo
from samecurve.inference import folders
from samecurve.metrics.console import number
from samecurve.run.run_directory import METRICS_LINE, WATCHED
from samecurve.run.status import STATUS, read_status
from samecurve.storage.file_lock import lock_folder
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.jsonl import JsonlFile, scan

POLL_SECONDS = 5.0
_PREFIX = ".watch-"  # of folders with a checkpoint's model
KILLED_POLLS = 24  # in a row without a process that writes into the run directory: a launcher may start it again


def run(directory: Path, measured: Callable[[Recipe, Path], Recipe], trust_remote_code: bool) -> int:
    """Evaluate each checkpoint of a run once, until the run is done, has failed or was killed. Returns the exit code.

    Args:
        directory: the run directory.
        measured: changes a checkpoint's recipe to evaluate its model in a folder on the held-out rows.
        trust_remote_code: see `loading.load_model`.
    """
    for left in directory.glob(f"{_PREFIX}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    damaged: set[tuple[Path, int]] = set()
    num_unlocked = 0
    with unwinding():
        while True:
            # read first, so that the last checkpoint is listed; a preempted run may go on
            state = read_status(directory / STATUS).get("state")
            num_unlocked = num_unlocked + 1 if state == "running" and _is_unlocked(directory) else 0
            _evaluate_new(directory, damaged, lambda path: _evaluate(directory, path, measured, trust_remote_code))
            if num_unlocked > KILLED_POLLS:
                print(f"no process writes into {directory}: the run was killed", flush=True)
                return 0
            if state in ("done", "failed"):
                return 0
            time.sleep(POLL_SECONDS)


def _is_unlocked(directory: Path) -> bool:
    try:
        lock_folder(directory).close()
    except (ConfigurationError, OSError):
        return False
    return True


def _evaluate_new(
    directory: Path, damaged: set[tuple[Path, int]], evaluate: Callable[[Path], dict[str, float]]
) -> None:
    """Evaluate the checkpoints that have no line in evaluations.jsonl, oldest first.

    damaged: checkpoints that cannot be evaluated, with the time of their commit; more are added.
    """
    files, written = LocalFileSystem(), JsonlFile(directory / WATCHED, METRICS_LINE)
    # read each time: a run that goes on from an earlier step takes back what it repeats
    done = {record["step"] for _, record in scan(directory / WATCHED, METRICS_LINE) if record}
    for checkpoint in reversed(list_checkpoints(files, directory / "checkpoints")):
        step, committed = step_of(checkpoint), _committed(checkpoint)
        if step in done or (checkpoint, committed) in damaged:
            continue
        problems, metrics = check_files(files, checkpoint), None
        try:
            metrics = None if problems else evaluate(checkpoint)
        except (SamecurveError, OSError):
            if checkpoint.exists():
                raise
        if metrics is not None:
            written.append({"step": step, **metrics})
            written.sync()
            loss = f"held-out loss {number(metrics['eval_loss'])}" if "eval_loss" in metrics else "evaluated"
            print(f"step {step}: {loss}", flush=True)
        elif problems and checkpoint.exists():
            print(f"{checkpoint}: damaged, not evaluated: {problems[0]}", flush=True)
            damaged.add((checkpoint, committed))
        else:
            print(f"{checkpoint}: deleted by checkpoint.keep before it was evaluated", flush=True)


def _committed(checkpoint: Path) -> int:
    """Return when a checkpoint was committed, in ns: a run may write a step again. 0 without a marker."""
    with suppress(OSError):
        return (checkpoint / MARKER).stat().st_mtime_ns
    return 0


def _evaluate(
    directory: Path, checkpoint: Path, measured: Callable[[Recipe, Path], Recipe], trust_remote_code: bool
) -> dict[str, float]:
    """Return the `eval_*` numbers of a checkpoint, whose model is in a temporary folder of the run meanwhile."""
    state = read_state(checkpoint)
    recipe = folders.with_code(folders.parse_recipe(state, checkpoint / "state.json"), trust_remote_code)
    with tempfile.TemporaryDirectory(dir=directory, prefix=_PREFIX) as temporary:
        folder = Path(temporary) / "model"
        from_checkpoint(directory, checkpoint, recipe, folder, ExportInfo(step=state["step"]))
        return evaluate_folder(measured(recipe, folder), folder, trust_remote_code)[1]
