"""Runs a training script in one process and under strategies, and judges whether it trains the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from samecurve.bench.jobs import StrategyJob, processes
from samecurve.errors import ConfigurationError, SamecurveError
from samecurve.prove.exported import export_problem
from samecurve.prove.judge import (
    Differences,
    Finding,
    Run,
    data_findings,
    findings,
    logged_findings,
    own_findings,
    weight_findings,
    why_not_compared,
)
from samecurve.prove.process import OF_SCRIPTS, Watch
from samecurve.specs.environment import versions
from samecurve.storage.atomic import utc_timestamp
from samecurve.storage.checksums import file_sha256
from samecurve.storage.terminal import TextConsole
from samecurve.strategy.launchers import Launch
from samecurve.strategy.plan import Strategy
from samecurve.strategy.resolve import describe_strategy, read_files


class Incomplete(Exception):
    """A run did not reach its last step."""


ALONE = StrategyJob("single", None, 1)


@dataclass(frozen=True)
class Verdict:
    """Of a strategy, or of a changed script.

    Attributes:
        reason: why its run did not reach the last step or is not judged, or "".
        run: its records.
        given: how one process reads the same rows at the same rates.
    """

    job: StrategyJob
    findings: tuple[Finding, ...]
    differences: Differences
    reason: str = ""
    run: Run = field(default_factory=lambda: Run("", []))
    given: Watch = field(default_factory=Watch)

    @property
    def passes(self) -> bool:
        return not self.reason and not self.findings


# Two processes would not find a GPU each, and rounding on a GPU is not measured.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ACCELERATE_TORCH_DEVICE": "cpu"}


class Processes:
    """Runs scripts, or a twin, in processes of their own; imports of libraries take time once.

    modules: the libraries.
    """

    def __init__(self, modules: Sequence[str] = OF_SCRIPTS) -> None:
        self._stack, self._modules = ExitStack(), modules

    def __enter__(self) -> Processes:
        words = [sys.executable, "-m", "samecurve.prove.process", *self._modules]
        self._starter = self._stack.enter_context(processes(words, subprocess.PIPE, 1, subprocess.PIPE, ON_CPU))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def run(self, request: list) -> int:
        """Return the exit code. request: see samecurve.prove.process."""
        assert self._starter.stdin is not None and self._starter.stdout is not None
        self._starter.stdin.write(json.dumps(request).encode() + b"\n")
        self._starter.stdin.flush()
        for line in self._starter.stdout:
            if line.strip().isdigit():  # packages print lines of their own while they are imported
                return int(line)
        raise SamecurveError("the process that starts the script's was killed; there may be too little memory")


class Proof:
    """The runs of a script, each in processes of its own below `folder`.

    Args:
        steps: updates of the weights; 0 lets the script end, and judges what it exports and logs of evaluations.
        resume: arguments with which the script goes on from what it saved last; None leaves that out.

    Attributes:
        own: the script in one process, as it is; with `against`, that script.
        problems: what is wrong with that.
        natural: the same by the number of batches of which one is made.
    """

    def __init__(
        self,
        processes: Processes,
        script: Path,
        arguments: Sequence[str],
        steps: int,
        folder: Path,
        against: Path | None = None,
        resume: Sequence[str] | None = None,
    ):
        self._processes = processes
        self.script, self.arguments, self.steps, self.folder = script, list(arguments), steps, folder
        self.against, self.resume, self.to_end = against or script, resume, not steps
        self._console = TextConsole()
        try:
            self.own = self.run(ALONE, Watch(), self.against)
        except Incomplete as error:
            raise ConfigurationError(f"{self.against}: in one process it {error}") from None
        self.steps = len(self.own)
        self.problems = (*own_findings(self.own), *self._exports(self.own))
        self.natural = {1: self.own}
        self._reference, self._rounding = self.own, None

    def run(self, job: StrategyJob, watch: Watch, script: Path, more: Sequence[str] = ()) -> Run:
        """Return the records of all steps, or raise Incomplete.

        watch: with the number of updates, if not all of them. more: arguments beside the script's.
        """
        folder = self.folder / job.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        steps = watch.detailed or watch.steps or (0 if self.to_end else self.steps)
        watch = replace(watch, folder=str(folder.resolve()), steps=steps, strategy=job.path and str(job.path))
        log = folder / "output.log"
        words = [job.world_size if job.path else 0, str(log), asdict(watch), str(script), *self.arguments, *more]
        with self._console.status(f"{job.name}: running"):
            code = self._processes.run(words)
        run = Run.read(job.name, folder)
        is_whole = len(run) == steps if steps else len(run) and not code
        if is_whole and len(run.ranks) == job.world_size:
            self._console.print(f"{job.name}: {len(run)} steps on {job.world_size} process(es)")
            return run
        if code or not len(run):
            reason = f"ended with code {code} after {len(run)} of {steps or 'all'} steps"
            text = log.read_text(encoding="utf-8", errors="replace")
            lines = [line.strip() for line in text.splitlines()]
            if errors := [line for line in lines if "Error" in line] or lines:
                reason += f": {errors[-1]}"
            # the script's line that led to the error
            if called := re.findall(rf'File "[^"]*{re.escape(script.name)}", line (\d+)', text):
                reason += f", at {script.name}:{called[-1]}"
        else:
            reason = f"ended by itself after {len(run)} of {steps} steps (--steps {len(run)} judges those)"
        reason += f", see {log}"
        self._console.print(f"{job.name}: {reason}")
        raise Incomplete(reason)

    def judge(self, job: StrategyJob) -> Verdict:
        """Run under a strategy, and in one process with the same rows and rates where the script's own differ."""
        try:
            run = self.run(job, Watch(), self.script)
            exports = (*self._exports(run),)  # before another run writes its own
            merged = max(1, round(run.rows(0).total() / max(1, self.own.rows(0).total())))
            if merged not in self.natural:
                self.natural[merged] = self.run(
                    replace(ALONE, name=f"single_x{merged}"), Watch(merged=merged), self.against
                )
            natural, given = self.natural[merged], Watch(merged=merged, replay=run.indices, rates=run.rates)
            if not self._reference.reads_as(run):
                self._reference, self._rounding = natural, None
            if not self._reference.reads_as(run):
                self._reference = self.run(replace(ALONE, name=f"reference_of_{job.name}"), given, self.against)
            if self._rounding is None:
                backwards = replace(ALONE, name=f"rounding_of_{job.name}")
                other = self.run(backwards, replace(given, backwards=True), self.against)
                self._rounding = Differences.between(other, self._reference)
            resumed = self._resumed(job, natural, len(run.ranks[0])) if self.resume is not None else ()
        except Incomplete as error:
            return Verdict(job, (), Differences(), str(error))
        differences = Differences.between(run, self._reference)
        seen = [*findings(run, _sharding(job), self._reference, differences, self._rounding)]
        if (reason := why_not_compared(self._rounding)) and "start" not in {finding.kind for finding in seen}:
            return Verdict(job, (), differences, reason)
        first = sorted(seen, key=lambda finding: finding.step)  # what is wrong in a step changes the loss of the next
        alone = [finding for finding in weight_findings(run) if finding not in self.problems]
        logged = logged_findings(run, self._reference, self._rounding)
        last = (*alone, *resumed, *logged, *exports)
        return Verdict(job, (*data_findings(run, natural), *first, *last), differences, run=run, given=given)

    def _exports(self, run: Run) -> Iterator[Finding]:
        saved = {event["value"][0]: event for event in run.events if event["event"] == "export" and event["step"]}
        for (folder, base), step in ((event["value"], event["step"]) for event in saved.values()):
            if problem := export_problem(Path(folder), base, run.ranks[0][:step]):
                yield Finding("export", step, problem)

    def _resumed(self, job: StrategyJob, natural: Run, steps: int) -> tuple[Finding, ...]:
        """Stop the script before its last step, go on from what it saved, and compare the steps after that."""
        assert self.resume is not None and self._rounding is not None
        killed = self.run(replace(job, name=f"{job.name}_killed"), Watch(steps=steps - 1), self.script)
        saved = max((event["step"] for event in killed.events if event["event"] == "save"), default=0)
        if not saved:
            return (Finding("resume", 1, f"nothing is saved before step {steps}"),)
        try:
            named = replace(job, name=f"{job.name}_resumed")
            run = self.run(named, Watch(steps=steps - saved), self.script, self.resume)
        except Incomplete as error:
            return (Finding("resume", saved + 1, f"after what was saved at step {saved} the script {error}"),)
        reference = self._reference.after(saved, killed)
        differences = Differences.between(run, reference)
        # what rounding has changed before the save is no part of the change since then
        del differences.values["update"], differences.places["update"]
        seen = findings(run, _sharding(job), reference, differences, self._rounding.after(saved))
        seen = [*data_findings(run, natural.after(saved, killed)), *sorted(seen, key=lambda finding: finding.step)]
        return tuple(Finding("resume", saved + kind[1], f"{kind[0]}: {kind[2]}") for kind in seen[:1])


def check(jobs: Sequence[StrategyJob]) -> None:
    """Raise ConfigurationError for strategies that Accelerate's own scripts cannot run."""
    problems = []
    for job in jobs:
        if job.path is None:
            problems.append(f"--strategies: {job.name} is what the others are compared with; leave it out")
        elif (dims := _described(job).dims).dp < dims.world_size:
            problems.append(f"--strategies: {job.name} divides more than rows, which only recipes can; see compare")
    if problems:
        raise ConfigurationError("\n".join(problems))


def _described(job: StrategyJob) -> Strategy:
    return describe_strategy(read_files(str(job.path)), Launch("torchrun", job.world_size))


def _sharding(job: StrategyJob) -> str:
    """Name the strategy as Recorder does what it sees."""
    if job.path is None:
        return ALONE.name
    sharding = _described(job).sharding
    return "ddp" if sharding == "none" else sharding


def certificate(proof: Proof, verdicts: Sequence[Verdict], nothing: str) -> dict:
    """Return what was judged, for certificate.json."""
    return {
        "script": str(proof.script),
        "sha256": file_sha256(proof.script),
        "arguments": proof.arguments,
        "steps": proof.steps,
        "date": utc_timestamp(),
        "versions": versions(),
        "passes": not nothing and not proof.problems and all(verdict.passes for verdict in verdicts),
        "shows_nothing": nothing,
        "problems": [finding._asdict() for finding in proof.problems],
        "strategies": [
            {
                "strategy": verdict.job.name,
                "processes": verdict.job.world_size,
                "passes": verdict.passes,
                "reason": verdict.reason,
                "findings": [finding._asdict() for finding in verdict.findings],
                "differences": {kind: max(values) for kind, values in verdict.differences.values.items()},
            }
            for verdict in verdicts
        ],
        "not_judged": [
            "dropout (switched off)",
            *(() if proof.to_end else ("evaluation", "exports", "steps after the last one")),
            *(() if proof.resume is not None else ("checkpoints",)),
        ],
    }
