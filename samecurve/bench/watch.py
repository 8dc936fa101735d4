"""Evaluation of a run's checkpoints while it trains, in a process of its own, for `evaluate --watch`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from samecurve.bench.evaluation import evaluate_folder
from samecurve.checkpoint.manifest import check_files, list_checkpoints, step_of
from samecurve.checkpoint.resume import read_state
from samecurve.config.schema import Recipe
from samecurve.errors import SamecurveError
from samecurve.export.convert import from_checkpoint
from samecurve.export.model_card import ExportInfo
from samecurve.inference import folders
from samecurve.metrics.console import number
from samecurve.run.run_directory import METRICS_LINE, WATCHED
from samecurve.run.status import STATUS, read_status
from samecurve.storage.filesystem import LocalFileSystem
from samecurve.storage.jsonl import JsonlFile, scan

POLL_SECONDS = 5.0


def run(directory: Path, measured: Callable[[Recipe, Path], Recipe], trust_remote_code: bool) -> int:
    """Evaluate each checkpoint of a run once, until the run is done or has failed. Returns the exit code.

    Args:
        directory: the run directory.
        measured: changes a checkpoint's recipe to evaluate its model in a folder on the held-out rows.
        trust_remote_code: see `loading.load_model`.
    """
    files, written = LocalFileSystem(), JsonlFile(directory / WATCHED, METRICS_LINE)
    gone: set[int] = set()  # steps whose checkpoints cannot be evaluated
    while True:
        # read each time: a run that goes on from an earlier step takes back what it repeats
        done = gone | {record["step"] for _, record in scan(directory / WATCHED, METRICS_LINE) if record}
        # read first, so that the last checkpoint is listed; a preempted run may go on
        is_ended = read_status(directory / STATUS).get("state") in ("done", "failed")
        for checkpoint in reversed(list_checkpoints(files, directory / "checkpoints")):
            step = step_of(checkpoint)
            if step in done:
                continue
            try:
                if problems := check_files(files, checkpoint):
                    print(f"{checkpoint}: damaged, not evaluated: {problems[0]}", flush=True)
                    gone.add(step)
                    continue
                metrics = _evaluate(directory, checkpoint, measured, trust_remote_code)
            except (SamecurveError, OSError):
                if checkpoint.exists():
                    raise
                print(f"{checkpoint}: deleted by checkpoint.keep before it was evaluated", flush=True)
                gone.add(step)
                continue
            written.append({"step": step, **metrics})
            written.sync()
            print(f"step {step}: held-out loss {number(metrics['eval_loss'])}", flush=True)
        if is_ended:
            return 0
        time.sleep(POLL_SECONDS)


def _evaluate(
    directory: Path, checkpoint: Path, measured: Callable[[Recipe, Path], Recipe], trust_remote_code: bool
) -> dict[str, float]:
    """Return the `eval_*` numbers of a checkpoint, whose model is in a temporary folder of the run meanwhile."""
    state = read_state(checkpoint)
    recipe = folders.with_code(folders.parse_recipe(state, checkpoint / "state.json"), trust_remote_code)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".watch-") as temporary:
        folder = Path(temporary) / "model"
        from_checkpoint(directory, checkpoint, recipe, folder, ExportInfo(step=state["step"]))
        return evaluate_folder(measured(recipe, folder), folder, trust_remote_code)[1]
