"""Runs of train.py that something happens to: started, hurt, ended, looked at, started again.

A `Victim` is one run directory. Each `hurt` starts the run, lets a fault happen and checks what has to hold after any
of them: the exit code, one message, nothing left running, nothing hung, every checkpoint as the undisturbed run wrote
it. `finish` starts it once more without a fault and compares all of it with the undisturbed ("golden") run.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import ROOT, SAVE_EVERY, STEPS, Run, Workspace, append_result, launch_command, once, rank_hashes
from started import LIMIT_SECONDS, Started

from samecurve.checkpoint.manifest import check_files, list_checkpoints
from samecurve.run.run_directory import read_metrics
from samecurve.run.status import read_status
from samecurve.storage.filesystem import LocalFileSystem

COLUMNS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "samples")
OUR_TRACEBACK = re.compile(rf'File "{re.escape(str(ROOT))}/(samecurve/|train\.py)')  # launchers have some of their own


@dataclass(frozen=True)
class Case:
    """What is run. strategy: a file of configs/, or None for plain python. lora: an adapter, not all of the model."""

    strategy: str | None = "ddp"
    world: int = 2
    launcher: str = "torchrun"
    lora: bool = False

    @property
    def name(self) -> str:
        return (self.strategy or "single") + (" LoRA" if self.lora else "")

    def __str__(self) -> str:
        return f"{self.name}-{self.world}-{self.launcher}"


EXPERTS = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
SINGLE = Case(None, 1, "python")


@dataclass(frozen=True)
class Expected:
    """After a fault. code: status.json's exit code. says: what one line of the output matches, and no other does.

    newest: the step of the newest checkpoint. state: status.json's. lost: steps, at most, besides those that ran while
    a checkpoint was being written; None: no bound, because none could be written.
    """

    code: int | None
    says: str = ""
    newest: int | None = None
    state: str = "failed"
    lost: int | None = SAVE_EVERY


@dataclass
class Record:
    """A line of the results: see scripts/reliability.py.

    could_save: False when the fault leaves no checkpoint to go on from, so that nothing bounds the lost steps.
    resumed_equal: None when the run did not have to come to the golden end. failed: the first line of the assertion.
    """

    strategy: str
    world: int
    launcher: str
    kind: str
    fault: str
    exit_code: int | None = None
    lost_steps: int = 0
    steps_while_saving: int = 0
    seconds: float = 0.0
    could_save: bool = True
    checkpoint_lost: bool = False
    corruption_accepted: bool = False
    hung: bool = False
    left_behind: int = 0
    resumed_equal: bool | None = None
    failed: str = ""


class Victim:
    """One run directory. Use `hurt` as often as needed, then `finish`."""

    def __init__(self, battery: Battery, case: Case, directory: Path):
        self.battery, self.case, self.directory = battery, case, directory
        self.records: list[Record] = []

    def start(
        self, faults: str = "", launcher: str = "", *more: str, script: str = "train.py", **environment: str
    ) -> Started:
        launcher = launcher or self.case.launcher
        command = self.battery.command(self.case, launcher, self.directory, *more, script=script)
        if faults:
            environment |= {"SAMECURVE_FAULTS": faults}
        return Started(command, self.battery.workspace.environment(**environment), self.directory)

    def hurt(
        self,
        kind: str,
        fault: str,
        expected: Expected,
        *more: str,
        faults: str = "",
        do: Callable[[Started], None] | None = None,
        launcher: str = "",
        **environment: str,
    ) -> str:
        """Run until the fault has ended it, check everything, return the output. do: the fault, done from outside."""
        record = Record(self.case.name, self.case.world, launcher or self.case.launcher, kind, fault)
        record.could_save = expected.lost is not None
        self.records.append(record)
        started = self.start(faults, launcher, *more, **environment)
        try:
            if do is not None:
                do(started)
        finally:
            record.hung = not started.wait()
        record.seconds, record.left_behind = round(started.seconds, 1), started.left
        self._look(record)
        self._check(record, expected, started)
        return started.output

    def _look(self, record: Record) -> None:
        """What the run directory says now."""
        _, record.exit_code = self._ended()
        metrics = read_metrics(self.directory)
        last, newest = (metrics[-1]["step"] if metrics else 0), self.newest()
        record.lost_steps = max(last - newest, 0)
        begun = last - last % SAVE_EVERY
        record.steps_while_saving = max(last - begun, 0) if begun > newest else 0
        record.checkpoint_lost = bool(self.damaged())

    def _ended(self) -> tuple[str | None, int | None]:
        """How the last start did: (state, exit code), of one that was refused beside an earlier run, too."""
        status = read_status(self.directory / "status.json")
        refused = status.get("refused_start")
        return ("failed", refused["exit_code"]) if refused else (status.get("state"), status.get("exit_code"))

    def _check(self, record: Record, expected: Expected, started: Started) -> None:
        output, (state, code) = started.output, self._ended()
        with self.telling(record):
            assert not record.hung, f"it did not end within {LIMIT_SECONDS:g} s:\n{output}"
            assert not record.left_behind, f"{record.left_behind} processes were left behind:\n{output}"
            wanted = (expected.state, expected.code)
            assert (state, code) == wanted, f"status.json says {(state, code)}, not {wanted}:\n{output}"
            found = re.findall(expected.says, output)
            assert len(found) == 1 or not expected.says, f"{expected.says!r} is there {len(found)} times:\n{output}"
            assert not expected.says or not OUR_TRACEBACK.search(output), output
            assert not record.checkpoint_lost, self.damaged()
            assert expected.newest in (None, self.newest()), f"newest is {self.newest()}, not {expected.newest}"
            lost = record.lost_steps - record.steps_while_saving
            assert expected.lost is None or lost <= expected.lost, record

    def newest(self) -> int:
        found = list_checkpoints(LocalFileSystem(), self.directory / "checkpoints")
        return int(found[0].name[5:]) if found else 0

    def damaged(self) -> list[str]:
        """Everything in a committed checkpoint that is not what the undisturbed run wrote at this step."""
        golden, found = self.battery.golden(self.case), []
        for folder in list_checkpoints(LocalFileSystem(), self.directory / "checkpoints"):
            found += [f"{folder}: {problem}" for problem in check_files(LocalFileSystem(), folder)]
            expected = golden.directory / "checkpoints" / folder.name
            if not found and expected.exists() and rank_hashes(folder) != rank_hashes(expected):
                found.append(f"{folder}: not what the undisturbed run has at this step")
        return found

    def finish(self, *more: str, faults: str = "", launcher: str = "", **environment: str) -> Run:
        """Start it once more, let it end, and compare with the undisturbed run: bit for bit."""
        started = self.start(faults, launcher, *more, **environment)
        started.wait()
        run = Run(self.directory, started.process.returncode, started.output)
        equal = False
        try:
            assert run.returncode == 0 and run.status["exit_code"] == 0, run.output
            assert not started.left, f"{started.left} processes were left behind:\n{run.output}"
            self.assert_equal(run)
            equal = True
        finally:
            self.write(equal)
        return run

    def is_golden(self) -> None:
        """It came to its end in spite of the fault, and as if there had been none."""
        self.assert_equal(Run(self.directory, 0, ""))
        self.write(True)

    def assert_equal(self, run: Run) -> None:
        golden = self.battery.golden(self.case)
        for name in COLUMNS:
            assert run.column(name) == golden.column(name), name
        assert rank_hashes(run.checkpoint(STEPS)) == rank_hashes(golden.checkpoint(STEPS))
        assert not self.damaged()

    def write(self, equal: bool | None) -> None:
        for record in self.records:
            record.resumed_equal = equal
            write_result(record)
        self.records = []

    @contextlib.contextmanager
    def telling(self, record: Record):
        """A case that fails is in the results too."""
        try:
            yield
        except AssertionError as error:
            record.failed = str(error).splitlines()[0][:200]
            self.write(None)
            raise


class Battery:
    """Undisturbed runs, each made once, and run directories to hurt."""

    def __init__(self, workspace: Workspace):
        self.workspace = workspace
        self._num_victims = 0

    def golden(self, case: Case) -> Run:
        # Under any launcher it is the same run: tests/distributed/test_launchers.py
        launcher = "python" if case.strategy is None else "torchrun"
        run = self.workspace.run(case.strategy, case.world, *self.overrides(case), launcher=launcher)
        assert run.returncode == 0, run.output
        return run

    def victim(self, case: Case = Case()) -> Victim:
        self.golden(case)
        self._num_victims += 1
        return Victim(self, case, self.workspace.folder / f"victim_{self._num_victims:03d}")

    def command(self, case: Case, launcher: str, directory: Path, *more: str, script: str = "train.py") -> list[str]:
        path = None if case.strategy is None else self.workspace.strategy(case.strategy)
        if path is None and launcher == "accelerate":
            path = self.workspace.strategy("single")
        start = launch_command(launcher, path, case.world, self.workspace.folder, script)
        if launcher == "torchrun" and more and more[0].startswith("--max-restarts"):
            start, more = [*start[:-1], more[0], start[-1]], more[1:]
        named = launcher != "accelerate" and path is not None
        options = ["--strategy", str(path)] if named else []
        overrides = [f"output_dir={directory}", *self.overrides(case)]
        return once([*start, str(self.workspace.recipe), *overrides, *more, *options])

    def overrides(self, case: Case) -> tuple[str, ...]:
        # DualPipeV takes at least as many micro-batches as it has stages
        smaller = case.world > 2 or case.strategy == "pipeline_dualpipev"
        micro_batch = f"batch.micro_batch_size={2 if smaller else 4}"
        model = self.workspace.lora if case.lora else ()
        if case.strategy in ("fsdp_ep", "fsdp_ep_tp"):  # they take no other model
            model = (f"model.config={json.dumps(EXPERTS)}",)
        return micro_batch, *model


def write_result(record: Record) -> None:
    append_result(asdict(record))
