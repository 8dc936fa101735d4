"""Short training jobs under different strategies, each in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import IO

from samecurve.config import loader as recipes
from samecurve.config.inheritance import UNITS, latest_overrides
from samecurve.config.key_hints import near_file
from samecurve.distributed.affinity import num_cores, share_of_cores
from samecurve.errors import ConfigurationError
from samecurve.reports.history import History
from samecurve.run.run_directory import RunDirectory, last_step
from samecurve.run.sessions import RUN_FACTS
from samecurve.run.status import STATUS, read_status
from samecurve.specs.environment import ROOT
from samecurve.storage.records import read_record
from samecurve.strategy.placement import REFERENCE, place_strategy
from samecurve.strategy.resolve import strategy_path

POLL_SECONDS = 0.5
PROCESSES_PER_CORE = 8  # a thousand Python processes on two cores take all of a machine's memory
RANKS = ("-m", "samecurve.launch.ranks")


@dataclass(frozen=True)
class StrategyJob:
    """A training job. path: the strategy's YAML; None runs plain python. world_size: number of processes."""

    name: str
    path: Path | None
    world_size: int


@dataclass(frozen=True)
class Outcome:
    """Result of a job.

    Attributes:
        run: content of run.json.
        directory: the job's run directory, with metrics.jsonl.
        reason: why there is no curve, in one line; "" if the run finished.
        refused: the configuration is wrong, or this machine cannot run the strategy.
        log: file with the job's output.
    """

    job: StrategyJob
    run: dict
    directory: Path
    reason: str
    refused: bool
    log: Path

    @cached_property
    def history(self) -> History:
        return History.read(self.directory)


def jobs(names: Sequence[str], num_processes: int) -> list[StrategyJob]:
    """Make one job per strategy, named as its file. names: in configs/, or files; empty for all of configs/, the
    reference first.

    Raises ConfigurationError for a strategy without a file, and for two of one name, whose runs would share a folder.
    """
    folder = Path("configs") if Path("configs").is_dir() else ROOT / "configs"
    known = sorted(folder.glob("*.yaml"), key=lambda path: (path.stem != REFERENCE, path.stem))
    paths = [Path(strategy_path(name)) for name in names] or known
    problems = [f"strategy {path}: no such file{near_file(str(path))}" for path in paths if not path.is_file()]
    counts = Counter(path.stem for path in paths)
    problems += [f"strategy {name}: given {count} times; keep one" for name, count in counts.items() if count > 1]
    if problems:
        raise ConfigurationError("\n".join(problems))
    placements = {path.stem: place_strategy(path, num_processes) for path in paths}
    return [StrategyJob(name, placement.path, placement.world_size) for name, placement in placements.items()]


def command(job: StrategyJob, recipe: str, overrides: Sequence[str], output_dir: Path) -> list[str]:
    # by train.py itself, whose ranks listen on loopback alone
    strategy = ["--strategy", str(job.path), "--num_processes", str(job.world_size)] if job.path is not None else []
    own = (f"output_dir={output_dir}", "checkpoint.mirror=null")  # a job must not replace the run in the store
    return [sys.executable, str(ROOT / "train.py"), recipe, *strategy, *latest_overrides([*overrides, *own])]


def shortened(recipe: str, given: Sequence[str], steps: int, **defaults: object) -> list[str]:
    """Extend the user's overrides to those of a short job of `steps` steps.

    Args:
        recipe: the recipe's path.
        given: the user's overrides. They have precedence over everything but `steps`; epochs and the best checkpoint
            are dropped.
        defaults: values for keys that the user did not set.

    Raises:
        ConfigurationError: reports every problem of the recipe, before any process is started.
    """
    schedule = recipes.load_recipe(recipe, given).schedule
    # without evaluations and checkpoints, what is made of them has no meaning
    unmade = {"checkpoint.best": None, "evaluate.patience": None, "export.checkpoint": "last"}
    short = {
        **defaults,
        **unmade,
        "schedule.warmup_steps": schedule.warmup_steps and min(schedule.warmup_steps, steps // 4),
        "schedule.decay_steps": schedule.decay_steps and min(schedule.decay_steps, steps // 4),
        "evaluate.every_steps": 0,
        "checkpoint.every_steps": 0,
        "numerics.rollback_ratio": None,  # it needs checkpoints
        "export.verify": "off",  # these models are thrown away
        "profile.steps": None,  # these steps may be after the last one
    }
    epochs = tuple(f"{'.'.join(key)}=" for _, key in UNITS)
    given = [word for word in given if not word.startswith((*epochs, *(f"{key}=" for key in unmade)))]
    keys = {argument.partition("=")[0] for argument in given}
    added = [f"{key}={'null' if value is None else value}" for key, value in short.items() if key not in keys]
    settings = latest_overrides([*given, *added, f"steps={steps}"])
    recipes.load_recipe(recipe, settings)
    return settings


def default_processes() -> int:
    """Return the number of GPUs, or 2 without GPUs."""
    import torch

    return torch.cuda.device_count() or 2


def count_processes(asked: int | None, num_gpus: int = 0) -> int:
    """Return the number of processes. Raises ConfigurationError for more than there are GPUs, or than cores can run."""
    most = num_gpus or PROCESSES_PER_CORE * num_cores()
    if asked and asked > most:
        why = "one per GPU" if num_gpus else f"{PROCESSES_PER_CORE} per core"
        raise ConfigurationError(f"--num_processes: found {asked}, but at most {most} can be started here, {why}")
    return asked or num_gpus or 2


def run(job: StrategyJob, arguments: Sequence[str], directory: Path, on_progress: Callable[[int], None]) -> Outcome:
    """Run a job to its end, with its output in `directory`.log.

    Args:
        arguments: the result of `command`.
        directory: the job's run directory.
        on_progress: called regularly with the number of finished steps.
    """
    log = directory.with_name(f"{directory.name}.log")
    set_aside(directory)
    with open(log, "w", encoding="utf-8") as stream, processes(arguments, stream, job.world_size) as process:
        while process.poll() is None:
            on_progress(last_step(directory))
            time.sleep(POLL_SECONDS)
    code = process.returncode and exit_code_of(directory, log, process.returncode)
    reason = "" if code == 0 else reason_of(directory, log, code).removeprefix(f"strategy {job.name}: ")
    refused = code == ConfigurationError.exit_code
    return Outcome(job, read_record(directory / "run.json", RUN_FACTS).value or {}, directory, reason, refused, log)


def set_aside(directory: Path) -> None:
    """Move an earlier run's files away: a job that fails before it writes its own must not appear to have its curve."""
    earlier = RunDirectory(directory, fresh=True)
    earlier.set_aside()
    earlier.close()


@contextmanager
def processes(
    arguments: Sequence[str],
    stream: IO | int | None,
    world_size: int,
    stdin: int | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen]:
    """Start a job in a process group of its own, which ends when this process ends by Ctrl-C, SIGTERM or an error.

    Args:
        stream: receives the job's output; None for this process's standard output.
        stdin: as subprocess.Popen has it, and so may `stream` be.
        variables: of the environment, beside this process's.
    """
    # torchrun would give each process 1 thread; the user's own value wins
    environment = {"OMP_NUM_THREADS": str(share_of_cores(world_size)), **os.environ, **variables}
    with unwinding():
        process = subprocess.Popen(
            arguments, stdin=stdin, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


@contextmanager
def unwinding() -> Iterator[None]:
    """End this process by an exception at SIGTERM, which would otherwise leave jobs and temporary folders behind."""
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def exit_code_of(directory: Path, log: Path, returncode: int) -> int:
    """Find the exit code of training in status.json or torchrun's report: torchrun itself always exits with 1."""
    code = read_status(directory / STATUS).get("exit_code")
    if code is not None:
        return code
    reported = re.findall(r"exitcode\s*:\s*(-?\d+)", log.read_text(encoding="utf-8", errors="replace"))
    return int(reported[0]) if reported else max(1, returncode)  # negative: a signal


def reason_of(directory: Path, log: Path, code: int) -> str:
    """Find the reason of a failure, as one line: from status.json, else from the log.

    Of an error with indented problems, the first problem is returned.
    """
    reason = read_status(directory / STATUS).get("reason")
    if not reason:
        text = log.read_text(encoding="utf-8", errors="replace")
        reason = "\n".join(re.findall(r"Error \(exit code \d+\)\n(.+(?:\n  .+)*)", text)[:1])
    lines = reason.splitlines()
    problems = [line.strip() for line in lines if line.startswith("  ")]
    if not lines:
        return f"failed with exit code {code}, see {log}"
    more = f" (and {len(problems) - 1} more, see {log})" if len(problems) > 1 else ""
    return (problems or lines)[0] + more
