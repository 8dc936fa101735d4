"""`init_trackers`, `log` and `end_training` of the Accelerator: none of Accelerate's trackers ends a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from samecurve.errors import ConfigurationError
from samecurve.specs.trackers import PREFIXES, RUN_IDS
from samecurve.storage.atomic import write_json
from samecurve.storage.object_store import credentials_problem, is_url, without_secrets
from samecurve.storage.records import read_record

_PROJECTS = {
    "wandb": "WANDB_PROJECT",
    "comet_ml": "COMET_PROJECT_NAME",
    "swanlab": "SWANLAB_PROJ_NAME",
    "trackio": "TRACKIO_PROJECT",
}  # Accelerate itself reads those of mlflow and clearml
_ACCOUNT = {"mlflow": " (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD)", "wandb": " (WANDB_API_KEY)"}


class Trackers(accelerate.Accelerator):
    """The part of `samecurve.Accelerator` that logs.

    A tracker that fails is reported once, gets nothing more and never ends the run. After `load_state`, wandb and
    mlflow continue the run whose name is in `ProjectConfiguration.logging_dir` (by default `project_dir`), and
    TensorBoard drops the steps that are logged again: a folder is that of one run. WANDB_PROJECT,
    MLFLOW_EXPERIMENT_NAME and the like precede `project_name`.

    Attributes:
        tracker_failures: the errors of the trackers that failed, by name.
        report: prints a line about a tracker; called on the main process alone.
    """

    report: Callable[[str], Any] = staticmethod(partial(print, flush=True))
    _begin: Callable[[bool, int | None], None] | None = None  # starts the trackers, once it is clear what they continue
    _has_loaded = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tracker_failures: dict[str, Exception] = {}
        given = kwargs.get("log_with") or ()
        names = {str(name) for name in (given if isinstance(given, list | tuple) else [given])}
        self._missing = names & {*LOGGER_TYPE_TO_CLASS} - {str(name) for name in self.log_with}

    @property
    def trackers(self) -> list[Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The trackers that have started and not failed."""
        self._start_waiting()
        return self._started

    @trackers.setter
    def trackers(self, values: list[Any]) -> None:
        self._started = values

    def init_trackers(
        self,
        project_name: str,
        config: dict | None = None,
        init_kwargs: dict | None = None,
        *,
        last_step: int | None = None,
    ) -> None:
        """Start the trackers of `log_with`; see Accelerate.

        Where an earlier run was logged into the same folder, they start with the first `log` or use of `trackers`:
        until then `load_state` may be called, which makes them continue that run.

        Args:
            init_kwargs: as in Accelerate. A "logging_dir" there precedes that of the project's configuration, and
                "run_name" of tensorboard, whose folder it is, `project_name`.
            last_step: the last step of the checkpoint that was loaded, 0 without one. None: as load_state and the first
                logged step say.
        """
        if not self.is_main_process:
            return

        def refuse() -> None:
            raise ConfigurationError("its package is not installed")

        for name in sorted(self._missing):
            self._attempt(name, refuse)
        own: list[Any] = [tracker for tracker in self.log_with if isinstance(tracker, GeneralTracker)]
        for tracker in own:
            self._attempt(tracker.name, partial(self._start, tracker, config))
        names = [str(name) for name in self.log_with if not isinstance(name, GeneralTracker)]
        folder = Path(self.logging_dir) if self.logging_dir else None
        self._begin = partial(self._start_named, names, project_name, config, init_kwargs or {}, folder)
        logged = folder is not None and ((folder / RUN_IDS).exists() or (folder / project_name).exists())
        if last_step is not None or not logged:
            self._start_waiting(bool(last_step), (last_step or 0) + 1)

    def _start_waiting(self, continues: bool | None = None, first_step: int | None = None) -> None:
        if (begin := self._begin) is not None:
            self._begin = None
            begin(self._has_loaded if continues is None else continues, first_step)

    def _start_named(
        self,
        names: list[str],
        project_name: str,
        config: dict | None,
        init_kwargs: dict,
        folder: Path | None,
        continues: bool,
        first_step: int | None,
    ) -> None:
        """Start the trackers that Accelerate knows by name.

        Args:
            folder: has the runs' names; None without logging_dir.
            continues: whether the run is that of an earlier session.
            first_step: the first step that will be logged, if it is known.
        """
        ids: dict[str, str] = {}
        if continues and folder is not None:
            record = read_record(folder / RUN_IDS, {"*": str})
            ids = record.value or {}
            if record.is_damaged:
                self.report(f"{record.path}: {record.problem}; trackers begin a new run")

        def start(name: str) -> None:
            # a tracker's package prints its URLs and writes them into files
            for variable, value in os.environ.items():
                is_own = variable.startswith(PREFIXES.get(name, " ")) and is_url(value)
                if is_own and (problem := credentials_problem(value)):
                    account = _ACCOUNT.get(name, "")
                    raise ConfigurationError(f"{variable}: {problem}, in variables of their own{account}")
            options = _options(name, ids.get(name), first_step if continues else None) | init_kwargs.get(name, {})
            # Accelerate passes a project, which the package prefers to its environment variable
            project = os.environ.get(_PROJECTS.get(name, "")) or project_name
            if name == "tensorboard":
                project = options.pop("run_name", project)
            kind = LOGGER_TYPE_TO_CLASS[name]
            where = (options.pop("logging_dir", self.logging_dir),) if kind.requires_logging_directory else ()
            tracker = kind(project, *where, **options)
            self._start(tracker, config)
            if name in ("mlflow", "wandb") and folder is not None:
                run = tracker.tracker
                ids[name] = run.info.run_id if name == "mlflow" else run.id
                (folder / RUN_IDS).parent.mkdir(parents=True, exist_ok=True)
                write_json(folder / RUN_IDS, ids)

        for name in names:
            self._attempt(name, partial(start, name))

    def _start(self, tracker: Any, config: dict | None) -> None:
        tracker.start()
        self._started.append(tracker)
        if config is not None:
            # mlflow refuses a parameter that has another value than in an earlier session
            self._attempt(tracker.name, partial(tracker.store_init_configuration, config), is_needed=False)

    def get_tracker(self, name: str, unwrap: bool = False) -> GeneralTracker:
        """See Accelerate. A tracker that has failed is a GeneralTracker that does nothing."""
        self._start_waiting()
        if name in self.tracker_failures:
            return GeneralTracker(_blank=True)
        return super().get_tracker(name, unwrap)

    def log(self, values: dict, step: int | None = None, log_kwargs: dict | None = None) -> None:
        """Log values to all trackers, on the main process only; see Accelerate."""
        if self.is_main_process:
            self._start_waiting(first_step=step)
            for tracker in self._started:  # _attempt makes another list
                options = (log_kwargs or {}).get(tracker.name, {})
                self._attempt(tracker.name, partial(tracker.log, values, step=step, **options))

    def finish_trackers(self) -> None:
        """Close the trackers, which write or upload what they still hold."""
        self._begin = None
        while self._started:
            tracker = self._started.pop(0)
            self._attempt(tracker.name, tracker.finish)

    def end_training(self) -> None:
        """Close the trackers and destroy the process group; see Accelerate."""
        self.finish_trackers()
        super().end_training()

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """See Accelerate. Trackers that start later continue the run of `logging_dir`."""
        position = super().load_state(*args, **kwargs)
        self._has_loaded = True
        return position

    def _attempt(self, name: str, action: Callable[[], Any], is_needed: bool = True) -> None:
        """Run an action of a tracker. An error is reported, and drops the tracker where the action is needed."""
        try:
            action()
        except Exception as error:  # of any tracker's package
            if is_needed:
                self._started = [tracker for tracker in self._started if tracker.name != name]
                self.tracker_failures[name] = error
            self.report(f"{failure(name, error)}; the run goes on without {'it' if is_needed else 'its configuration'}")


def failure(name: str, error: Exception) -> str:
    """Return a line about a tracker that failed, without passwords."""
    return f"tracker {name} failed: {without_secrets(str(error))}"


def _options(name: str, run_id: str | None, first_step: int | None) -> dict[str, Any]:
    """Return what the tracker's constructor needs to continue a run.

    Args:
        run_id: the run to continue, of mlflow and wandb; None begins one.
        first_step: the step from which on an earlier session's values are replaced; None in a fresh run.
    """
    if name == "tensorboard":
        return {} if first_step is None else {"purge_step": first_step}
    if name == "mlflow":  # which reads no environment variable for the run's name
        run_name = os.environ.get("MLFLOW_RUN_NAME")
        return {"run_id": run_id} | ({"run_name": run_name} if run_name else {})
    if name == "wandb":  # which prefers an argument to its environment variable
        options = {"WANDB_RUN_ID": ("id", run_id), "WANDB_RESUME": ("resume", "allow")}
        return dict(option for variable, option in options.items() if not os.environ.get(variable))
    return {}
