"""Processes of a training script, or of a twin, under observation, forked from one that has imported libraries once.

    python -m samecurve.prove.process [MODULE ...]      what to import

Each line of stdin is a request as JSON, each line of stdout the exit code. A request is

    [number of processes, log, a Watch, script, arguments ...]     or
    [number of processes, log, null, folder, last step before a kill or 0, arguments of train.py ...]

with 0 processes for one without a launcher. A script sees what `accelerate launch` with the strategy's file would give
it, on a CPU. A twin writes which rows each step reads into `folder`, as rank_N.jsonl.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from samecurve.accelerator import cpu_bridge, launch_env
from samecurve.data.batches import StepBatches
from samecurve.data.micro_batch import MicroBatch
from samecurve.launch.ranks import environments
from samecurve.prove.recorder import Reading, Recorder
from samecurve.prove.twin import row_keys
from samecurve.specs.environment import ROOT
from samecurve.strategy.launchers import OWN_PROCESSES, Launch
from samecurve.strategy.resolve import describe_strategy, read_files

# what scripts import, and what train.py does, that takes them seconds
OF_SCRIPTS = ("transformers.trainer", "deepspeed", "peft", "trl")
OF_TWINS = ("peft", "deepspeed", "samecurve.training.startup", "samecurve.engines.factory", "samecurve.engines.zero")
GRACE_SECONDS = 5.0  # in which the other processes may say why they end, too


@dataclass(frozen=True)
class Watch:
    """How a run of a script is observed.

    Attributes:
        folder: of the records, `rank_N.jsonl`.
        steps: updates of the weights; 0 lets the script end.
        strategy: an Accelerate YAML; None for a single process without a launcher.
        merged: batches of the script that become one; 1 leaves them alone.
        backwards: whether the rows of each batch are read in the opposite order.
        replay: rows of each batch, in place of the script's.
        rates: learning rates of each update, in place of the script's.
        detailed: the step that is recorded module by module; 0 for none.
    """

    folder: str = ""
    steps: int = 0
    strategy: str | None = None
    merged: int = 1
    backwards: bool = False
    replay: list[list[int]] | None = None
    rates: list[list[float]] | None = None
    detailed: int = 0


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for name in sys.argv[1:]:
        with suppress(ImportError, OSError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(_run(*json.loads(line)), file=answers, flush=True)


def _run(num_processes: int, log: str, watch: dict[str, Any] | None, *words: str) -> int:
    """Run forks of this process, and end all when one fails, whose exit code is returned."""
    ranks = environments(num_processes) if num_processes else [dict(os.environ)]
    watched = Watch(**watch) if watch is not None else None
    running = {_fork(environment, log, watched, words) for environment in ranks}
    failure, deadline = 0, 0.0
    while running:
        process, status = os.waitpid(-1, os.WNOHANG if failure else 0)
        running.discard(process)
        if status and not failure:
            failure, deadline = abs(os.waitstatus_to_exitcode(status)), time.monotonic() + GRACE_SECONDS
        elif failure and not process:
            time.sleep(0.05)
        if failure and time.monotonic() > deadline:
            for other in running:
                os.kill(other, signal.SIGKILL)
    return failure


def _fork(environment: dict[str, str], log: str, watch: Watch | None, words: Sequence[str]) -> int:
    """Return the number of the new process, which ends in here."""
    process = os.fork()
    if process:
        return process
    code: Any = 1
    try:
        stream = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for number in (1, 2):
            os.dup2(stream, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()  # forks would draw the same where a script forgets its seed
        numpy.random.seed()
        torch.set_num_threads(max(1, torch.get_num_threads() // int(environment.get("WORLD_SIZE", "1"))))
        if watch is None:
            train_twin(Path(words[0]), int(words[1]), *words[2:])
        else:
            observe(watch, *words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train_twin(folder: Path, killed_after: int, *arguments: str) -> None:
    """Run train.py in this process and write the rows of each step, up to SIGKILL after a step; 0 lets it end."""
    stream = (folder / f"rank_{os.environ.get('RANK', '0')}.jsonl").open("w", encoding="utf-8")
    iterate = StepBatches.__iter__

    def watched(batches: StepBatches) -> Iterator[list[MicroBatch]]:
        for micro_batches in iterate(batches):
            if killed_after and batches.step > killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
            rows = [key for batch in micro_batches for key in row_keys(batch)]
            stream.write(json.dumps({"step": batches.step, "shard": batches.shard[0], "rows": rows}) + "\n")
            stream.flush()
            yield micro_batches

    if "WORLD_SIZE" in os.environ:  # started as `train.py --num_processes` starts its own
        os.environ[OWN_PROCESSES] = os.environ["WORLD_SIZE"]
    StepBatches.__iter__ = watched  # pyright: ignore[reportAttributeAccessIssue]
    _run_script(str(ROOT / "train.py"), arguments)


def _run_script(path: str, arguments: Sequence[str]) -> None:
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    runpy.run_path(path, run_name="__main__")


def observe(watch: Watch, script: str, *arguments: str) -> None:
    """Run a script in this process, a rank of a world that the environment describes."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if watch.strategy is not None:
        files = read_files(watch.strategy)
        strategy = describe_strategy(files, Launch("torchrun", world))
        if strategy.deepspeed is not None and strategy.deepspeed_path is None:
            strategy = replace(strategy, accelerate=files.written)  # ours lacks what the engines give to DeepSpeed
        launch_env.export_launch_env(strategy)
        cpu_bridge.prepare(strategy.distributed, strategy.shards_model, strategy.deepspeed is not None)
        if strategy.deepspeed is not None:
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        _keep_gloo(None if strategy.deepspeed is not None else PartialState().distributed_type)
        dist.init_process_group = lambda *_, **__: None  # a script's own finds the group made
    reading = Reading(watch.merged, watch.backwards, watch.replay)
    reading.install()
    Recorder(Path(watch.folder, f"rank_{rank}.jsonl"), watch.steps, reading, watch.rates, watch.detailed).install()
    _run_script(script, arguments)


def _keep_gloo(kind: DistributedType | None) -> None:
    """Have Accelerate's state made again as it is, where a script resets it, as Trainer does: by itself it would choose
    NCCL, or no group at all without a GPU. kind: None leaves that to Accelerate."""
    construct = PartialState.__init__

    @wraps(construct)
    def constructed(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        is_new = not PartialState._shared_state
        construct(self, cpu, **kwargs | ({"backend": "gloo"} if is_new else {}))
        if is_new and kind is not None:
            PartialState._shared_state["distributed_type"] = kind

    PartialState.__init__ = constructed
    PartialState(backend="gloo")


if __name__ == "__main__":
    main()
