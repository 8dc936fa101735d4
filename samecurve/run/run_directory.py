"""Run directory: the files of a run, and how a new session takes them over.

    run.json        configuration reported by the live engine  status.json    running | done | failed | preempted
    metrics.jsonl   one line per optimizer step                skipped.jsonl  skipped optimizer steps, with their rows
    checkpoints/    step_00000040/ ...                         model/         the Hugging Face export
    tensorboard/    the same metrics for TensorBoard           stacks/        stack traces of all ranks after a hang
    trackers/       files of other trackers                    heartbeats/    signs of life, see heartbeat.py
    profile/        traces and a summary of the steps in profile.steps
    bad_rows.jsonl  rows of the data that were dropped because they cannot be used, see data.bad_rows
    rejected_model/ an export that is not the trained model, see export.verify
    previous/N/     files of an earlier session that this one does not continue, moved there whole

Only rank 0 writes. On other ranks the same calls do nothing, so that the training loop need not distinguish ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from samecurve.checkpoint.commit import finish_replacements
from samecurve.checkpoint.manifest import list_checkpoints, step_of
from samecurve.errors import CheckpointError, ConfigurationError, RepeatedFailureError, SamecurveError, StorageError
from samecurve.run.status import REFUSED, STATUS, counted, read_status, split_refused, with_refused
from samecurve.specs.data_names import BAD_ROWS
from samecurve.storage.atomic import storage_errors, utc_timestamp, write_json
from samecurve.storage.file_lock import DEAD_HOST_SECONDS, lock_folder
from samecurve.storage.filesystem import LocalFileSystem, make_durable_folder, next_free
from samecurve.storage.jsonl import JsonlFile, last_record, scan
from samecurve.storage.records import COUNT, are_numbers, is_number
from samecurve.strategy.launchers import STARTING_OVER, is_restart

State = Literal["running", "done", "failed", "preempted"]
WATCHED = "evaluations.jsonl"  # of `evaluate --watch`, another process than the run's
RECORDS = ("run.json", STATUS, "metrics.jsonl", "skipped.jsonl", BAD_ROWS, WATCHED)
REJECTED = "rejected_model"
FOLDERS = ("model", REJECTED, "tensorboard", "trackers", "checkpoints", "stacks", "profile")
OF_ONE_SESSION = ("model", REJECTED, "stacks", "profile", "run.json")  # and status.json, see _move
MADE_OF_MODEL = ("merged", "merged-*", "model-*")
# another version may write anything beside; readers get the numbers of it
METRICS_LINE = {"step": COUNT, "loss?": (float, None), "expert_share?": ([float], None), "*": object}
SAMPLES = "samples.jsonl"  # texts of evaluate.samples and of `generate`
SAMPLES_LINE = {"step": COUNT, "prompt": str, "text": str}
REPORT, REPORTS = "report.html", "report*.html"  # from `samecurve report`; report_OTHER.html compares two runs


class RunDirectory:
    """Claims `path` for one run. Files that the run does not continue move to `previous/N/`: nothing is lost or mixed.

    Nothing is moved before `begin` (except stacks/), and the status.json of a finished run stays until then. A refused
    start (other data, another model) thus leaves an earlier run unchanged; status.json records it (see status.py).

    Args:
        reads: paths that this run will read (model, data). They must not be among the files that are moved.
        resume, fresh: see strategy.plan.Plan.
        fetch: called on rank 0, under the lock, to add checkpoints from elsewhere.

    Attributes:
        continues: the directory has checkpoints to resume from.
        is_done: an earlier run finished here, as seen by this rank; False after `begin`.
        is_exported: its exported model exists, as seen by this rank.
        notice: one line about the files that were moved, "" if none were.
        step: the last step with a record.

    Raises (on rank 0):
        ConfigurationError: a live run writes here (an automatic restart waits for a dead host's lock), or the directory
            contains files that are not a run's.
        CheckpointError: the directory has checkpoints that `resume` would leave behind.
        RepeatedFailureError: the run failed three times in a row at one step and this is an automatic restart.
        StorageError: the directory cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        is_main: bool = True,
        reads: Iterable[str | Path | None] = (),
        resume: str = "none",
        fresh: bool = False,
        fetch: Callable[[], object] = lambda: None,
    ):
        self.path = Path(path)
        self.model, self.profile = self.path / "model", self.path / "profile"
        self.rejected_model = self.path / REJECTED
        self.checkpoints, self.tensorboard = self.path / "checkpoints", self.path / "tensorboard"
        self.metrics = self.path / "metrics.jsonl"
        self.is_main = is_main
        self.notice = ""
        self.step = 0
        self.continues = self._begun = False
        self._failures: dict = {}
        self._present: list[Path] = []
        self._aside: Path | None = None
        self._metrics = JsonlFile(self.metrics, METRICS_LINE)
        self._skipped = JsonlFile(self.path / "skipped.jsonl")
        self._watched = JsonlFile(self.path / WATCHED, METRICS_LINE)
        if is_main:
            with storage_errors(self.path):
                if self.path.exists() and not self.path.is_dir():
                    raise StorageError(
                        f"output_dir: {self.path} is a file, expected a folder; use output_dir={next_free(self.path)}"
                    )
                make_durable_folder(self.path)
                self._lock = lock_folder(self.path, DEAD_HOST_SECONDS if is_restart(os.environ) else 0, print)
        self._before, self._refused = split_refused(read_status(self.path / STATUS))
        self.is_done = self._before.get("state") == "done"
        if not is_main:
            return
        try:
            with storage_errors(self.path):
                fetch()
                self._claim([Path(os.path.realpath(read)) for read in reads if read], resume, fresh)
        except SamecurveError as error:
            if self._is_run():
                with suppress(SamecurveError):  # the error itself says more
                    self.status("failed", str(error), exit_code=error.exit_code)
            self.close()
            raise

    def _claim(self, reads: list[Path], resume: str, fresh: bool) -> None:
        finish_replacements(LocalFileSystem(), self.checkpoints)
        # a killed start may have moved status.json to `previous/N/` already
        folders = (self.path, *reversed(previous_folders(self.path)))
        last = next(filter(None, (read_status(folder / STATUS) for folder in folders)), {})
        self._failures = count_failures(last, last_step(self.path))
        check_repeated_failures(self._failures, last, os.environ)
        self.continues = bool(list_checkpoints(LocalFileSystem(), self.checkpoints)) and not fresh
        if links := sorted(path.name for path in self.checkpoints.glob("step_*") if path.is_symlink()):
            raise CheckpointError(
                f"{self.checkpoints}: {', '.join(links)} is a link, and links are not followed; move the folder itself "
                "there, or remove the link"
            )
        # What `begin` will move, and stacks/; for status.json see `_move`. Move checkpoints first, or a kill in between
        # would let the next start resume from them. Move run.json last, because without it the rest does not look like
        # a run's files.
        names = OF_ONE_SESSION if self.continues else ("checkpoints", *FOLDERS, *reversed(RECORDS))
        paths = [self.path / name for name in dict.fromkeys(names) if name != STATUS]
        is_run = self._is_run()
        if is_run:  # what `merge` and `export` made of the earlier model, before run.json
            paths[-1:-1] = [path for pattern in MADE_OF_MODEL for path in sorted(self.path.glob(pattern))]
        self._present = [path for path in paths if path.exists()]
        inside = resume not in ("auto", "none") and Path(resume).resolve().parent == self.checkpoints.resolve()
        if self.continues and resume != "auto" and not inside:
            raise CheckpointError(
                f"output_dir: {self.path} holds checkpoints of an earlier run, which --resume {resume} would leave "
                f"behind; resume from them (--resume auto), start another run (output_dir={next_free(self.path)}), or "
                "add --fresh to move them aside"
            )
        if self._present and not is_run:
            listed = ", ".join(f"{path.name}/" for path in self._present)
            raise ConfigurationError(
                f"output_dir: {self.path} holds {listed} but no run.json, so it is not the directory of a run; "
                f"use output_dir={next_free(self.path)}"
            )
        for read in reads:
            if any(read.is_relative_to(path.resolve()) for path in self._present):
                raise ConfigurationError(
                    f"output_dir: {self.path} holds {read}, which this run reads, and a new session moves an earlier "
                    f"one's files aside; use output_dir={next_free(self.path)}"
                )
        # The stacks of a hung session move at once: this session opens files of the same names before `begin`.
        stacks = self.path / "stacks"
        if stacks in self._present:
            self._present.remove(stacks)
            self._aside = self._next_previous()
            os.rename(stacks, self._aside / stacks.name)
        # until `begin` has moved them, a restart must not go on from the checkpoints that this start leaves behind
        if fresh or inside:
            (self.path / STARTING_OVER).touch()
        else:
            (self.path / STARTING_OVER).unlink(missing_ok=True)

    @property
    def is_exported(self) -> bool:
        return any((self.model / file).is_file() for file in ("config.json", "adapter_config.json"))

    def write_run(self, facts: dict) -> None:
        if self.is_main:
            write_json(self.path / "run.json", facts)

    def status(
        self, state: State, reason: str = "", step: int = 0, exit_code: int | None = None, force: bool = False
    ) -> None:
        """Write status.json. A start that fails before `begin` is recorded next to the state of the earlier run.

        Args:
            exit_code: the exit code of the process; None while it runs.
            force: write from another rank, if rank 0 cannot.
        """
        if not (self.is_main or force):
            return
        file = self.path / STATUS
        before, failures = self._before, self._failures
        if not self.is_main:
            current = read_status(file)
            failures = counted(current)
            # rank 0, which this rank replaces, may have overwritten the earlier session's status
            before = current.get("earlier") or (split_refused(current)[0] if current.get("state") == "done" else {})
        if self._begun:
            before = {}
        if state == "failed" and before:
            write_json(file, with_refused(before, reason, exit_code, failures))
        elif not self.is_done:
            content = {"state": state, "reason": reason, "step": step, "exit_code": exit_code, "time": utc_timestamp()}
            if before:
                content["earlier"] = before  # until `begin` moves it to the earlier session's files
            write_json(file, content | (failures if state != "done" else {}))

    def accept(self) -> None:
        """Drop the record of a refused start: this start has nothing to do, and the earlier run stays as it is."""
        if self.is_main and self._refused:
            write_json(self.path / STATUS, self._before)

    def append_metrics(self, record: dict) -> None:
        self.step = record["step"]
        if self.is_main:
            self._metrics.append(record)

    def sync_metrics(self) -> None:
        """Sync the appended lines to disk, so that they survive a power cut. Raises StorageError."""
        if self.is_main:
            self._metrics.sync()
            self._skipped.sync()

    def append_skipped(self, record: dict) -> None:
        if self.is_main:
            self._skipped.append(record)

    def begin(
        self,
        step: int = 0,
        record: dict | None = None,
        busy: Callable[[], None] = lambda: None,
        trains: bool = True,
    ) -> None:
        """Take the directory over for this session, once recipe, data and checkpoint are accepted.

        Args:
            step: the step to resume after. Later steps move to `previous/N/`, with the earlier session's files.
            record: that step's line of metrics.jsonl, from the checkpoint; added if the file lacks it.
            busy: called from time to time to report progress.
            trains: False where no step is left. run.json then stays that of the session that trained.
        """
        self.step = step
        if self.continues and not trains:
            self._present = [path for path in self._present if path.name != "run.json"]
        if self.is_main:
            with storage_errors(self.path):
                if self.continues:
                    self._go_on(step, record, busy)
                else:
                    self.set_aside()
        self._begun, self.is_done = True, False
        self.status("running")

    def set_aside(self) -> None:
        """Move all files of an earlier run to `previous/N/`."""
        if self._present or self._before or self._aside:
            target = self._aside or self._next_previous()
            self._move(target)
            self.notice = f"moved the files of an earlier run in {self.path} to {target}"
        (self.path / STARTING_OVER).unlink(missing_ok=True)

    def _go_on(self, step: int, record: dict | None, busy: Callable[[], None]) -> None:
        target = self._aside or self._next_previous()
        self._move(target)
        for folder in list_checkpoints(LocalFileSystem(), self.checkpoints):
            if step_of(folder) > step:
                (target / "checkpoints").mkdir(exist_ok=True)
                LocalFileSystem(busy).move_folder(folder, target / "checkpoints")  # checkpoints/ may link to elsewhere
        num_later, num_damaged = self._metrics.truncate(step, target, record)
        num_damaged += self._skipped.truncate(step, target)[1]
        num_damaged += self._watched.truncate(step, target)[1]
        (self.path / STARTING_OVER).unlink(missing_ok=True)
        self.notice = f"resuming after step {step} in {self.path}; the earlier session's files are in {target}"
        if num_later:
            self.notice += f", with {num_later} steps after the checkpoint, which are repeated"
        if num_damaged:
            self.notice += f"; cut or damaged lines of metrics.jsonl and skipped.jsonl, moved there too: {num_damaged}"

    def _move(self, target: Path) -> None:
        if self._before:  # status.json itself already belongs to this session, unless a finished run's was kept
            write_json(target / STATUS, self._before)
            (self.path / STATUS).unlink(missing_ok=True)
        reports = sorted(
            [*self.path.glob(REPORTS), *self.path.glob(SAMPLES)]
        )  # of the earlier session; they would look like the new run's
        for path in (*reports, *self._present):
            if path.exists():
                os.rename(path, target / path.name)

    def close(self) -> None:
        """Release the directory's lock before the process ends. Files moved to `previous/N/` stay there."""
        if self.is_main:
            self._lock.close()

    def _is_run(self) -> bool:
        return any((self.path / name).exists() for name in RECORDS)

    def _next_previous(self) -> Path:
        numbers = [0, *(int(folder.name) for folder in previous_folders(self.path))]
        target = self.path / "previous" / str(numbers[-1] + 1)
        target.mkdir(parents=True)
        return target


def previous_folders(run: Path) -> list[Path]:
    """List the folders with earlier sessions' files, oldest first."""
    return sorted((path for path in run.glob("previous/*") if path.name.isdecimal()), key=lambda path: int(path.name))


def last_step(path: Path) -> int:
    """Return the last step in a run directory's metrics.jsonl, 0 without one. Reads from the file's end."""
    record = last_record(path / "metrics.jsonl", METRICS_LINE)
    return record["step"] if record else 0


def read_metrics(path: Path) -> list[dict]:
    """Read a run directory's metrics, one dict per finished step, without damaged lines. For short runs."""
    return [record for record in iterate_metrics(path) if record is not None]


def iterate_metrics(path: Path) -> Iterator[dict | None]:
    """Yield a run directory's metrics, one dict per finished step, None for a damaged line.

    A step that the run did not evaluate has the numbers of `evaluate --watch`, if any.
    """
    watched = {record["step"]: record for _, record in scan(path / WATCHED, METRICS_LINE) if record}
    for _, record in scan(path / "metrics.jsonl", METRICS_LINE):
        if record is not None and record["step"] in watched:
            record = watched[record["step"]] | record
        if record is not None and not are_numbers(record):
            record = {key: value for key, value in record.items() if is_number(value) or key == "expert_share"}
        yield record


MOST_FAILURES = 3


def count_failures(status: Mapping, last_step: int) -> dict:
    """Count consecutive failures at one step, including the last start's, which `status` describes.

    A refused start counts as a failure at the step from which it would have resumed. Returns the keys in
    `status.COUNTED`; {} if the last start did not fail.
    """
    last = {**status, **status.get(REFUSED, {})}
    # a status that still says running is that of a killed process
    if REFUSED not in status and status.get("state") not in ("running", "failed"):
        return {}
    if (last.get("exit_code") or 0) > 128:  # 128 + signal number: the run was ended from outside, the step did not fail
        return counted(last)
    step = last_step + 1
    times = last.get("failures", 0) + 1 if last.get("failing_step") == step else 1
    return {"failing_step": step, "failures": min(times, MOST_FAILURES)}


def check_repeated_failures(failures: Mapping, status: Mapping, environ: Mapping[str, str]) -> None:
    """Raise RepeatedFailureError if this is an automatic restart after MOST_FAILURES failures at one step.

    `failures` is what `count_failures` returned for `status`, whose reason is quoted.
    """
    if failures.get("failures", 0) < MOST_FAILURES or not is_restart(environ):
        return
    start = f"step {failures['failing_step']} failed {MOST_FAILURES} times in a row, so it is not tried again"
    last = {**status, **status.get(REFUSED, {})}.get("reason") or "the processes ended without giving a reason"
    # The last start may itself have been refused with this message, if the launcher keeps restarting: do not nest it.
    raise RepeatedFailureError(last if last.startswith(start) else f"{start}; the last time: {last}")
