"""The run directory: what a run leaves behind and how it gets there.

    run.json        what runs, asked of the live engine      status.json   running | done | failed | preempted
    metrics.jsonl   one line per optimizer step              model/        the Hugging Face export
    tensorboard/    the same numbers                         checkpoints/  step_00000040/ ...
    previous/N/     earlier runs into the same directory, moved aside whole

Rank 0 writes; on the others the same calls do nothing, so the loop need not ask.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import ConfigurationError, StorageError

if TYPE_CHECKING:
    from .engines.resolve import Plan

try:
    import fcntl
except ImportError:  # Windows: no lock, everything else works
    fcntl = None

State = Literal["running", "done", "failed", "preempted"]
RECORDS = ("run.json", "status.json", "metrics.jsonl")
FOLDERS = ("model", "tensorboard", "checkpoints")
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
VERSIONED = ("torch", "accelerate", "deepspeed", "transformers", "datasets", "samecurve")


class RunDirectory:
    """Claim `path` for one run. An earlier run's files go to `previous/N/`: nothing is lost and nothing mixed.

    reads: paths that this run will read (model, data). They must not be among the files that are moved aside.
    notice: one line about what was moved, "" when nothing was. step: the last one with a record.
    Raises ConfigurationError when a live run writes there or it holds somebody else's files, StorageError when it
    cannot be written.
    """

    def __init__(self, path: str | Path, is_main: bool = True, reads: Iterable[str | Path | None] = ()):
        self.path = Path(path)
        self.is_main = is_main
        self.notice = ""
        self.step = 0
        if not is_main:
            return
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
            self._move_aside([Path(read).resolve() for read in reads if read])

    model = property(lambda self: self.path / "model")
    tensorboard = property(lambda self: self.path / "tensorboard")
    checkpoints = property(lambda self: self.path / "checkpoints")
    metrics = property(lambda self: self.path / "metrics.jsonl")

    def write_run(self, facts: dict) -> None:
        if self.is_main:
            write_json(self.path / "run.json", facts)

    def status(self, state: State, reason: str = "", step: int = 0, exit_code: int | None = None) -> None:
        """exit_code: what the process ends with; None while it runs."""
        if self.is_main:
            content = {"state": state, "reason": reason, "step": step, "exit_code": exit_code, "time": now()}
            write_json(self.path / "status.json", content)

    def append_metrics(self, record: dict) -> None:
        """One line. What is not finite is written as null: NaN is not JSON."""
        self.step = record["step"]
        if not self.is_main:
            return
        line = json.dumps(plain(record), allow_nan=False) + "\n"
        with writing(self.metrics), open(self.metrics, "a", encoding="utf-8") as stream:
            stream.write(line)

    def close(self) -> None:
        """Give the directory back before the process ends; an earlier run's files stay moved aside."""
        if self.is_main:
            self._lock.close()

    def _move_aside(self, reads: list[Path]) -> None:
        present = [self.path / name for name in (*RECORDS, *FOLDERS) if (self.path / name).exists()]
        if not present:
            return
        if not any((self.path / name).exists() for name in RECORDS):
            names = ", ".join(f"{path.name}/" for path in present)
            raise ConfigurationError(
                f"output_dir: {self.path} holds {names} but no run.json, so it is not the directory of a run; "
                "choose another output_dir"
            )
        for read in reads:
            if any(read.is_relative_to(path.resolve()) for path in present):
                raise ConfigurationError(
                    f"output_dir: {self.path} holds {read}, which this run reads, and a new run moves an earlier "
                    "run's files aside; choose another output_dir"
                )
        target = self._next_previous()
        for path in present:
            os.rename(path, target / path.name)
        self.notice = f"an earlier run was in {self.path}: moved to {target}"

    def _next_previous(self) -> Path:
        numbers = [int(path.name) for path in self.path.glob("previous/*") if path.name.isdigit()]
        target = self.path / "previous" / str(max(numbers, default=0) + 1)
        target.mkdir(parents=True)
        return target


def _lock(path: Path) -> Any:
    """An open file with an exclusive lock, which the kernel releases when the process ends, however it ends."""
    stream = open(path / ".lock", "a")
    if fcntl is None:
        return stream
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise ConfigurationError(
            f"output_dir: another run is writing into {path}; wait for it, end it, or choose another output_dir"
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS_HERE:
            raise
    return stream


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError (full disk, no permission) into a StorageError that names the path and the errno."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "unknown")
        reason = error.strerror or str(error)
        raise StorageError(f"{error.filename or path}: {reason} (errno {error.errno}, {code})") from error


def write_json(path: Path, content: dict) -> None:
    """Whole or not at all: a reader never sees half a file, a full disk leaves the old one."""
    text = json.dumps(plain(content), indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.partial")
    with writing(path):
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)


def plain(value: Any) -> Any:
    """JSON's types only: floats that are not finite become None, paths strings, NumPy's scalars Python's."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_metrics(path: Path) -> list[dict]:
    """A run directory's metrics, one dict per step; [] when no step was finished."""
    file = path / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def run_facts(plan: Plan, arguments: Sequence[str], described: dict, data: dict, device: str) -> dict:
    """run.json's content, which is also the header's.

    arguments: train.py's. described: the live engine's own words (`engine`, `world_size`, `data_parallel_size`,
    `pipeline_stages`, `gradient_accumulation_steps`, `weight_dtype`, `reduce_dtype`, `num_parameters`,
    `num_parameters_per_rank`, ...). data: the task's. device: its name, as a person would say it.
    """
    recipe, strategy = plan.recipe, plan.strategy
    return {
        **_typed(arguments),
        "output_dir": recipe.output_dir,
        "strategy": strategy.name,
        "strategy_path": strategy.path or strategy.deepspeed_path,
        "family": strategy.family,
        "launcher": strategy.launcher,
        **described,
        "device": device,
        "precision": recipe.precision,
        "data": data,
        "recipe": recipe.model_dump(),
        "accelerate": strategy.accelerate,
        "deepspeed": strategy.deepspeed,
        "versions": versions(),
        "started": now(),
    }


def _typed(arguments: Sequence[str]) -> dict:
    """The recipe's file and the overrides, so that `samecurve summary` can say how to do it again."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("recipe_path")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--strategy")
    parser.add_argument("--local_rank")
    typed = parser.parse_intermixed_args(arguments)
    return {"recipe_path": typed.recipe_path, "overrides": typed.overrides}


def versions() -> dict[str, str | None]:
    """Installed versions of what decides a run's numbers; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
