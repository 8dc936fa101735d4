"""The recipe's experiment trackers, and the advice that depends on the logged records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from samecurve.metrics.data_wait import WaitAdvice
from samecurve.storage.atomic import write_json

if TYPE_CHECKING:
    from samecurve.config.schema import Data
    from samecurve.metrics.meter import Meter

RUN_IDS = "runs.json"  # the run's names in its trackers, by which a later session continues them


class Trackers:
    """Logs the record of each step with Accelerate's trackers.

    A tracker that fails is reported once and gets nothing more. It never ends the run: metrics.jsonl has every step.

    Args:
        names: logging.trackers; empty on ranks that do not log.
        meter: names the scalars.
        data: for the advice on data loading.
        folder: the run directory.
        log: prints one line (on rank 0 only).
    """

    def __init__(self, names: Sequence[str], meter: Meter, data: Data, folder: Path, log: Callable[[str], None]):
        self._names, self._meter, self._folder, self._log = names, meter, folder, log
        self._advice = WaitAdvice(data)
        self._open: dict[str, GeneralTracker] = {}
        self._ids: dict[str, str] = {}  # the content of RUN_IDS

    def open(self, start_step: int) -> None:
        """Open the trackers. start_step: the last step of the earlier session's checkpoint, 0 in a fresh run."""
        for name in self._names:
            self._try(name, lambda name=name: self._start(name, start_step))

    def log(self, record: dict) -> None:
        """Log the step's record."""
        self._log(self._advice.after(record))
        self._log(self._meter.doubt(record))
        scalars = self._meter.scalars(record) if self._open else {}
        for name, tracker in [*self._open.items()]:  # a copy: _try drops a tracker that fails
            self._try(name, lambda tracker=tracker: tracker.log(scalars, step=record["step"]))

    def close(self) -> None:
        """Close the trackers, which upload or write what they still hold."""
        for name, tracker in [*self._open.items()]:
            self._try(name, tracker.finish)

    def _start(self, name: str, start_step: int) -> None:
        project, folder = self._folder.resolve().name, self._folder / "trackers"
        ids = folder / RUN_IDS
        if start_step and not self._ids and ids.is_file():
            self._ids = json.loads(ids.read_text())
        kind, options = LOGGER_TYPE_TO_CLASS[name], {}
        if name == "tensorboard":
            # repeated steps replace those that the earlier session logged after its last checkpoint
            options = {"logging_dir": self._folder, "purge_step": start_step + 1}
            project = "tensorboard"  # its folder
        elif name == "mlflow":
            options = {"run_id": self._ids.get(name)}
        elif name == "wandb":
            options = {"id": self._ids.get(name), "resume": "allow", "dir": str(folder)}
        elif kind.requires_logging_directory:
            options = {"logging_dir": str(folder)}
        if name != "tensorboard":
            folder.mkdir(exist_ok=True)
        tracker = kind(project, **options)
        tracker.start()
        self._open[name] = tracker
        if name in ("mlflow", "wandb"):
            run = tracker.tracker
            self._ids[name] = run.info.run_id if name == "mlflow" else run.id
            write_json(ids, self._ids)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # of any tracker's package
            self._open.pop(name, None)
            text = f"{error}; this tracker gets no more metrics, metrics.jsonl has every step"
            self._log(f"logging.trackers: {name} failed: {text}")
