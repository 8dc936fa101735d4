"""The recipe's experiment trackers, and the advice that depends on the logged records."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from samecurve.errors import ConfigurationError, SamecurveError
from samecurve.metrics.data_wait import WaitAdvice
from samecurve.specs.trackers import PREFIXES
from samecurve.storage.atomic import known_cause, write_json
from samecurve.storage.object_store import credentials_problem, is_url, without_secrets
from samecurve.storage.records import read_record
from samecurve.strategy.restarts import is_restart

if TYPE_CHECKING:
    from samecurve.config.schema import Data
    from samecurve.metrics.meter import Meter

_PROJECTS = {
    "wandb": "WANDB_PROJECT",
    "comet_ml": "COMET_PROJECT_NAME",
    "swanlab": "SWANLAB_PROJ_NAME",
    "trackio": "TRACKIO_PROJECT",
}  # Accelerate itself reads those of mlflow and clearml
_OFFLINE = {"wandb": " (WANDB_MODE=offline needs no account)"}
_ACCOUNT = {"mlflow": " (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)", "wandb": " (WANDB_API_KEY)"}
_LEFT = "this tracker gets no more metrics, metrics.jsonl has every step"
RUN_IDS = "runs.json"  # the run's names in its trackers, by which a later session continues them


class Trackers:
    """Logs the record of each step with Accelerate's trackers.

    A tracker that fails after its start gets nothing more, is reported then and at the end, and never ends the run:
    metrics.jsonl has every step.

    Args:
        names: logging.trackers; empty on ranks that do not log.
        meter: names the scalars.
        data: for the advice on data loading.
        folder: the run directory.
        log: prints one line (on rank 0 only).
        needed: a tracker that cannot start is an error (logging.on_failure), except in an automatic restart.
    """

    def __init__(
        self,
        names: Sequence[str],
        meter: Meter,
        data: Data,
        folder: Path,
        log: Callable[[str], None],
        needed: bool = True,
    ):
        self._names, self._meter, self._folder, self._log = names, meter, folder, log
        self._needed = needed and not is_restart(os.environ)
        self._advice = WaitAdvice(data)
        self._open: dict[str, GeneralTracker] = {}
        self._ids: dict[str, str] = {}  # the content of RUN_IDS
        self._failures: dict[str, str] = {}  # by name, in a line
        self._cause: SamecurveError | None = None  # a full disk

    def open(self, start_step: int) -> None:
        """Open the trackers. start_step: the last step of the earlier session's checkpoint, 0 in a fresh run.

        Raises:
            ConfigurationError: lists the trackers that cannot start.
            StorageError: the disk is full.
        """
        for name in self._names:
            self._try(name, lambda name=name: self._start(name, start_step))
        if self._cause and self._needed:
            raise self._cause
        if self._failures and self._needed:
            lines = (
                f"  {line}; set up its environment variables{_OFFLINE.get(name, '')}, remove it, or train without it "
                "(logging.on_failure=warn)"
                for name, line in self._failures.items()
            )
            raise ConfigurationError("\n".join(["a tracker cannot start", *lines]))
        for line in self._failures.values():
            self._log(f"{line}; {_LEFT}")

    def log(self, record: dict) -> None:
        """Log the step's record."""
        self._log(self._advice.after(record))
        self._log(self._meter.doubt(record))
        scalars = self._meter.scalars(record) if self._open else {}
        for name, tracker in [*self._open.items()]:  # a copy: _try drops a tracker that fails
            if not self._try(name, lambda tracker=tracker: tracker.log(scalars, step=record["step"])):
                self._log(f"{self._failures[name]}; {_LEFT}")

    def close(self) -> None:
        """Close the trackers, which upload or write what they still hold, and repeat which ones have failed."""
        for name, tracker in [*self._open.items()]:
            self._try(name, tracker.finish)
        for line in self._failures.values():
            self._log(line)

    def _start(self, name: str, start_step: int) -> None:
        _check_urls(name)
        folder = self._folder / "trackers"
        # Accelerate passes a project, which the package prefers to its environment variable
        project = os.environ.get(_PROJECTS.get(name, "")) or self._folder.resolve().name
        ids = folder / RUN_IDS
        if start_step and not self._ids:
            record = read_record(ids, {"*": str})
            self._ids = record.value or {}
            if record.is_damaged:
                self._log(f"{ids}: {record.problem}; trackers begin a new run")
        kind, options = LOGGER_TYPE_TO_CLASS[name], {}
        if name == "tensorboard":
            # repeated steps replace those that the earlier session logged after its last checkpoint
            options = {"logging_dir": self._folder, "purge_step": start_step + 1}
            project = "tensorboard"  # its folder
        elif name == "mlflow":
            options = {"run_id": self._ids.get(name)}
        elif name == "wandb":
            chosen = {"WANDB_RESUME": ("resume", "allow"), "WANDB_DIR": ("dir", str(folder))}
            options = {"id": self._ids.get(name)} | dict(chosen[key] for key in chosen if not os.environ.get(key))
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

    def _try(self, name: str, action: Callable[[], None]) -> bool:
        """Whether the action of a tracker succeeds; one that fails is dropped, and recorded in `_failures`."""
        try:
            action()
        except Exception as error:  # of any tracker's package
            self._open.pop(name, None)
            self._failures[name] = f"logging.trackers: {name} failed: {without_secrets(str(error))}"
            self._cause = self._cause or known_cause(error)
        return name not in self._failures


def _check_urls(name: str) -> None:
    """Refuse credentials in a tracker's URLs, which its package prints and writes into files."""
    for variable, value in os.environ.items():
        is_own = variable.startswith(PREFIXES.get(name, " ")) and is_url(value)
        if is_own and (problem := credentials_problem(value)):
            raise ConfigurationError(f"{variable}: {problem}, in variables of their own{_ACCOUNT.get(name, '')}")
