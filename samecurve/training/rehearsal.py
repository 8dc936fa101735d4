"""Rehearsal of a run before its first step: the longest batch, an evaluation, a checkpoint and an export.

Each rank starts a process that builds the run's engine under the run's strategy, goes through these stages and ends.
The rank itself has not loaded torch by then. A rehearsal can therefore leave nothing behind in it: no weight, no
moment, no state of a random generator, no peak of memory. The price is that the run starts twice. Files are written
into a folder of their own in output_dir, which is on the run's disk, and removed.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from samecurve.config.schema import Logging, Profile
from samecurve.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    HangError,
    NumericError,
    PeerError,
    SamecurveError,
    StorageError,
    TopologyError,
)
from samecurve.run import lifecycle
from samecurve.run.status import STATUS, read_status
from samecurve.storage.atomic import read_json, storage_errors
from samecurve.strategy import preflight

if TYPE_CHECKING:
    from samecurve.strategy.plan import Plan

FOLDER = ".rehearsal"
REPORT = "report.json"
NOTHING_LEFT = 13  # exit code of a rehearsal's process
GIB = 2**30
_ERRORS: dict[int, type[SamecurveError]] = {
    kind.exit_code: kind
    for kind in (ConfigurationError, DataError, CheckpointError, NumericError, TopologyError, StorageError, HangError)
}


class DoesNotFit(ConfigurationError):
    """A stage needs more memory than there is. The exit code is that of a rehearsal's process, not of a run."""

    exit_code = 12


class Stage(NamedTuple):
    """What one stage took.

    Attributes:
        peak_bytes: largest peak of a process's memory during the stage.
        rank: the process that reached it.
        free_bytes: smallest amount of memory that a device had left after the stage.
        written_bytes: size of the files written; 0 for stages that write none.
        disk_bytes: free space on the disk of output_dir before the stage.
    """

    name: str
    seconds: float
    peak_bytes: int
    rank: int
    free_bytes: int
    written_bytes: int
    disk_bytes: int


@dataclass(frozen=True)
class Assignment:
    """Work of a rehearsal's process. checkpoints: those of the run itself, to resume from."""

    plan: Plan
    checkpoints: Path


def before_training(plan: Plan) -> Plan:
    """Rehearse the run if its recipe says so. Every rank calls this before it loads torch.

    Returns:
        The plan to train.

    Raises:
        SamecurveError: the run would fail; the class is that of the failure.
    """
    if plan.recipe.rehearse:
        try:
            print_report(run(plan) or [])
        except DoesNotFit as error:
            raise ConfigurationError(str(error)) from error
    return plan


def run(plan: Plan) -> list[Stage] | None:
    """Rehearse in a new process and wait for its end.

    Returns:
        The stages, [] on other ranks than 0; None if the run has no step left.

    Raises:
        DoesNotFit: memory does not suffice.
        SamecurveError: the rehearsal failed for another reason.
    """
    folder = Path(plan.recipe.output_dir) / FOLDER
    is_main = os.environ.get("RANK", "0") == "0"
    created = _missing(folder.parent)
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)  # of a rehearsal that was killed
    try:
        code = _wait_for_process(Assignment(_rehearsed(plan, folder), folder.parent / "checkpoints"))
        if code == NOTHING_LEFT:
            return None
        if code:
            raise _error(code, read_status(folder / STATUS).get("reason", ""))
        return [Stage(*values) for values in read_json(folder / REPORT)["stages"]] if is_main else []
    finally:
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)
            for path in created:
                path.rmdir()


def _missing(folder: Path) -> list[Path]:
    """Return the folder and its parents as far as they do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _rehearsed(plan: Plan, folder: Path) -> Plan:
    """Return the plan of the rehearsal: the run's own, but with files elsewhere and no trackers."""
    changed = {"output_dir": str(folder), "logging": Logging(trackers=()), "profile": Profile(), "rehearse": False}
    return replace(plan, recipe=plan.recipe.model_copy(update=changed))


def _wait_for_process(assignment: Assignment) -> int:
    """Run the rehearsal's process of this rank and return its exit code, negative for a signal."""
    package = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search}
    if "TORCHELASTIC_USE_AGENT_STORE" in environment:
        # torchrun's key-value store keeps the addresses of these processes; launch_env.meet_again gives each count a
        # prefix of its own
        environment["TORCHELASTIC_RESTART_COUNT"] = f"rehearsal {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    command = [sys.executable, "-m", "samecurve.training.rehearsal"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None  # a pipe
    try:
        with storage_errors(Path("rehearsal")):
            pickle.dump(assignment, process.stdin)
            process.stdin.close()
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _error(code: int, reason: str) -> SamecurveError:
    """Return the error of a rehearsal's process. reason: from its status.json."""
    if code == -9:
        reason = (
            "its process was killed (SIGKILL), most likely because the host's memory was full (dmesg says so); lower "
            "batch.micro_batch_size, or choose a strategy that shards or offloads less to the host"
        )
    text = f"rehearsal: {reason or f'its process ended with exit code {code}; its own output says why'}"
    if code == DoesNotFit.exit_code:
        return DoesNotFit(text)
    return _ERRORS[code](text) if code in _ERRORS else PeerError(text, max(code, 1))


def print_report(stages: list[Stage]) -> None:
    """Print what each stage took, beside what is free. Nothing for [], see `run`."""
    if not stages:
        return
    line = "{:<14}{:>9}{:>11}{:>6}{:>10}{:>13}{:>10}"
    print(line.format("rehearsal", "seconds", "peak GiB", "rank", "free GiB", "written GiB", "disk GiB"))
    for stage in stages:
        written, disk = (f"{size / GIB:.3g}" for size in (stage.written_bytes, stage.disk_bytes))
        sizes = (written, disk) if stage.written_bytes else ("", "")
        peak, free = f"{stage.peak_bytes / GIB:.3f}", f"{stage.free_bytes / GIB:.1f}"
        print(line.format(stage.name, f"{stage.seconds:.1f}", peak, stage.rank, free, *sizes))
    print(f"rehearsal done in {sum(stage.seconds for stage in stages):.0f} s: everything fits", flush=True)


if __name__ == "__main__":
    preflight.quiet_libraries()
    # imports torch and transformers, which a rank that only starts a rehearsal must not
    lifecycle.leave(importlib.import_module("samecurve.training.rehearsal_process").main())
