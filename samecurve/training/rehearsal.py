"""Rehearsal of a run before its first step: the longest batch, an evaluation, a checkpoint and an export.

Each rank starts a process that builds the run's engine under the run's strategy, goes through these stages and ends.
The rank itself has not loaded torch by then. A rehearsal can therefore leave nothing behind in it: no weight, no
moment, no state of a random generator, no peak of memory. The price is that the run starts twice. Files are written
into a folder of their own in output_dir, which is on the run's disk, and removed.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from samecurve.config import own_code
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
from samecurve.run.run_directory import REJECTED
from samecurve.run.status import STATUS, read_status
from samecurve.run.watchdog import LAST_RESORT_SECONDS
from samecurve.specs.gpus import GIB
from samecurve.storage import terminal
from samecurve.storage.records import read_record
from samecurve.strategy import preflight
from samecurve.strategy.launchers import is_restart
from samecurve.strategy.timetables import micro_batch_rule

if TYPE_CHECKING:
    from samecurve.strategy.plan import Plan, Strategy

FOLDER = ".rehearsal"
REPORT = "report.json"
EVIDENCE = ("stacks", REJECTED)  # kept after a failure, whose message names them; the next rehearsal removes them
NOTHING_LEFT = 13  # exit code of a rehearsal's process
POLL_SECONDS = 0.2
_COUNT = itertools.count()  # of the rehearsals of this process, the same on all ranks


class DoesNotFit(ConfigurationError):
    """A stage needs more memory than there is. The exit code is that of a rehearsal's process, not of a run."""

    exit_code = 12


_KINDS = (ConfigurationError, DataError, CheckpointError, NumericError, TopologyError, StorageError, HangError)
_ERRORS: dict[int, type[SamecurveError]] = {kind.exit_code: kind for kind in (*_KINDS, DoesNotFit)}


class RehearsedStage(NamedTuple):
    """Measurements of one stage.

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
    """Work of a rehearsal's process.

    Attributes:
        plan: the plan of the run.
        checkpoints: those of the run itself, to resume from.
        own_code: see own_code.allowed.
    """

    plan: Plan
    checkpoints: Path
    own_code: dict[str, tuple[str, ...]] = field(default_factory=own_code.allowed)


def before_training(plan: Plan) -> Plan:
    """Rehearse the run if its recipe says so and this is no restart, or if its micro-batch size is `auto`.

    Every rank calls this before it loads torch.

    Returns:
        The plan to train, see `rehearse`.
    """
    asked = plan.recipe.rehearse and not is_restart(os.environ)
    # a restart has to find the size for `auto` once more
    return rehearse(plan) if asked or plan.recipe.batch.is_auto else plan


def rehearse(plan: Plan, ranks: Sequence[Mapping[str, str]] = (os.environ,)) -> Plan:
    """Rehearse a run, and print the time and memory of each stage.

    Args:
        ranks: environment variables of the ranks that this process stands for.

    Returns:
        The plan, with the largest micro-batch size that fits instead of `auto`.

    Raises:
        ConfigurationError: the run does not fit into memory.
        SamecurveError: the run would fail for another reason; the class is that of the failure.
    """
    try:
        plan, stages = _largest_that_fits(plan, ranks) if plan.recipe.batch.is_auto else (plan, run_stages(plan, ranks))
    except DoesNotFit as error:
        raise ConfigurationError(str(error)) from error
    if _has_main(ranks):
        print_report(stages)
    return plan


def _largest_that_fits(plan: Plan, ranks: Sequence[Mapping[str, str]]) -> tuple[Plan, list[RehearsedStage] | None]:
    """Find the largest micro-batch size that fits, by bisection: each trial is a whole rehearsal.

    All ranks come to the same size, because their processes agree about each trial.

    Returns:
        The plan with this size, and the stages of its rehearsal. If the run has no step left, any size, and None.

    Raises:
        DoesNotFit: not even the smallest size fits.
    """
    sizes = candidates(plan.recipe.batch.rows_per_rank(plan.strategy.dims.dp)[0], plan.strategy)
    largest: tuple[Plan, list[RehearsedStage] | None] | None = None
    first, last = 0, len(sizes) - 1
    while first <= last:
        middle = (first + last) // 2
        batch = plan.recipe.batch.model_copy(update={"micro_batch_size": sizes[middle]})
        tried = replace(plan, recipe=plan.recipe.model_copy(update={"batch": batch}))
        try:
            largest = tried, run_stages(tried, ranks)
            text = "fits"
            first = middle + 1
        except DoesNotFit as error:
            if middle == 0:
                raise
            text = f"does not fit: {str(error).splitlines()[0]}"
            last = middle - 1
        else:
            if largest[1] is None:
                break
        if _has_main(ranks):
            print(f"batch.micro_batch_size {sizes[middle]} {text}", flush=True)
    assert largest is not None  # the smallest size is tried before anything else is given up
    return largest


def candidates(num_rows: int, strategy: Strategy) -> list[int]:
    """Return the micro-batch sizes worth trying for a rank with `num_rows` rows per step, in ascending order.

    For each number of micro-batches that the strategy's pipeline schedule takes, this is the smallest size, which
    spreads the rows evenly.
    """
    sizes = sorted({-(-num_rows // count) for count in range(1, num_rows + 1)})
    if strategy.torch_schedule is None:
        return sizes
    name, ranks = strategy.schedule, strategy.dims.pp
    return [size for size in sizes if not micro_batch_rule(name, -(-num_rows // size), ranks)]


def run_stages(plan: Plan, ranks: Sequence[Mapping[str, str]] = (os.environ,)) -> list[RehearsedStage] | None:
    """Run the stages of a rehearsal in new processes and wait for their end. ranks: see `rehearse`.

    Returns:
        The stages, [] where `ranks` lacks rank 0; None if the run has no step left.

    Raises:
        DoesNotFit: memory does not suffice.
        SamecurveError: the rehearsal failed for another reason.
    """
    folder = Path(plan.recipe.output_dir) / FOLDER
    is_main = _has_main(ranks)
    # removed in the end, so that a run that is refused leaves no empty folder
    created = [path for path in (folder.parent, *folder.parent.parents) if not path.exists()] if is_main else []
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)  # of a rehearsal that was killed
    try:
        # the run's own plan, but with files elsewhere and no trackers
        changed = {"output_dir": str(folder), "logging": Logging(trackers=()), "profile": Profile(), "rehearse": False}
        changed |= {"checkpoint": plan.recipe.checkpoint.model_copy(update={"mirror": None})}
        changed |= {"export": plan.recipe.export.model_copy(update={"checkpoint": "last"})}  # none is the best
        rehearsed = replace(plan, recipe=plan.recipe.model_copy(update=changed))
        code = _wait_for_processes(Assignment(rehearsed, folder.parent / "checkpoints"), ranks)
        if code == NOTHING_LEFT:
            return None
        if code:
            reason = read_status(folder / STATUS).get("reason", "")
            if code == -9:
                reason = (
                    "its process was killed (SIGKILL), most likely because the host's memory was full (dmesg says so); "
                    "lower batch.micro_batch_size, or choose a strategy that shards or offloads less to the host"
                )
            text = f"rehearsal: {reason or f'its process ended with exit code {code}; its own output says why'}"
            raise _ERRORS[code](text) if code in _ERRORS else PeerError(text, max(code, 1))
        if not is_main:
            return []
        report = read_record(folder / REPORT, {"stages": [list]}).require(StorageError, "start the run again")
        return [RehearsedStage(*values) for values in report["stages"]]
    finally:
        if is_main and not any((folder / name).exists() for name in EVIDENCE):
            shutil.rmtree(folder, ignore_errors=True)
        for path in created:
            with suppress(OSError):  # it is not empty: evidence, or what another process has written meanwhile
                path.rmdir()


def _has_main(ranks: Sequence[Mapping[str, str]]) -> bool:
    return any(rank.get("RANK", "0") == "0" for rank in ranks)


def _wait_for_processes(assignment: Assignment, ranks: Sequence[Mapping[str, str]]) -> int:
    """Run the rehearsal's processes and return the first exit code that is not 0, negative for a signal; else 0."""
    processes = [_start(assignment, rank) for rank in ranks]
    deadline, codes = math.inf, []
    try:
        while waiting := [process for process in processes if process.poll() is None]:
            codes = codes or [process.returncode for process in processes if process.returncode]
            if codes and deadline == math.inf:
                deadline = time.monotonic() + LAST_RESORT_SECONDS  # the others see the failure and end by themselves
            if time.monotonic() > deadline:
                break
            with suppress(subprocess.TimeoutExpired):
                waiting[0].wait(POLL_SECONDS)
        return next(iter(codes or [process.returncode for process in processes if process.returncode]), 0)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()


def _start(assignment: Assignment, rank: Mapping[str, str]) -> subprocess.Popen:
    # python -m searches the working directory, which need not be the one with this package
    package = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [package, rank.get("PYTHONPATH")]))
    environment = {**rank, "PYTHONPATH": search}
    if "TORCHELASTIC_USE_AGENT_STORE" in environment:
        # torchrun's key-value store keeps the addresses of these processes; launch_env.rejoin_after_restart gives each
        # count a prefix of its own
        restart = rank.get("TORCHELASTIC_RESTART_COUNT", "0")
        environment["TORCHELASTIC_RESTART_COUNT"] = f"rehearsal {next(_COUNT)} of {restart}"
    command = [sys.executable, "-m", "samecurve.training.rehearsal"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
    assert process.stdin is not None  # a pipe
    with suppress(BrokenPipeError), process.stdin as stream:  # it has ended; its exit code says why
        pickle.dump(assignment, stream)
    return process


def print_report(stages: list[RehearsedStage] | None) -> None:
    """Print the time and memory of each stage, and the free memory. stages: the result of `run_stages`."""
    if stages is None:
        print("rehearsal: the run has no step left", flush=True)
        return
    line = "{:<14}{:>9}{:>11}{:>6}{:>10}{:>13}{:>10}"
    print(line.format("rehearsal", "seconds", "peak GiB", "rank", "free GiB", "written GiB", "disk GiB"))
    for stage in stages:
        written, disk = (f"{size / GIB:.3g}" for size in (stage.written_bytes, stage.disk_bytes))
        sizes = (written, disk) if stage.written_bytes else ("", "")
        peak, free = f"{stage.peak_bytes / GIB:.3f}", f"{stage.free_bytes / GIB:.1f}"
        print(line.format(stage.name, f"{stage.seconds:.1f}", peak, stage.rank, free, *sizes).rstrip())
    print(f"rehearsal done in {sum(stage.seconds for stage in stages):.0f} s: everything fits", flush=True)


if __name__ == "__main__":
    terminal.set_up()
    preflight.quiet_libraries()
    # imports torch and transformers, which a rank that only starts a rehearsal must not
    lifecycle.leave(importlib.import_module("samecurve.training.rehearsal_process").main())
