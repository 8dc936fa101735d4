"""Proves that a recipe's twin trains the same under each strategy as in a plain loop, also after a kill."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from samecurve.bench.jobs import StrategyJob, exit_code_of, reason_of
from samecurve.errors import ConfigurationError
from samecurve.export import reload
from samecurve.prove.judge import LEAST_NORM, Differences, Finding, relative
from samecurve.prove.process import OF_TWINS
from samecurve.prove.script import Processes
from samecurve.prove.twin import KILLED, MICRO_BATCH, SAVED, STEPS, Twin, derive
from samecurve.reports.chart import Curve, chart
from samecurve.run.run_directory import iterate_metrics
from samecurve.specs.environment import shipped_file, versions
from samecurve.specs.precision import DTYPES
from samecurve.specs.tasks import TASKS
from samecurve.storage.atomic import storage_errors, utc_timestamp, write_json, write_text
from samecurve.storage.checksums import file_sha256
from samecurve.storage.jsonl import scan
from samecurve.storage.terminal import TextConsole, aligned
from samecurve.strategy.placement import REFERENCE

CHECKS = ("rows", "loss", "norm", "resume", "weights", "export", "precision")
_ALONE = StrategyJob(REFERENCE, None, 1)
_KEPT = shutil.ignore_patterns("model", "rejected_model", "tensorboard", "rows", "heartbeats")
_VERIFIED = re.compile(r"^export reloaded by transformers .* differ by at most (\S+) ", re.M)


@dataclass
class Curves:
    """Losses and gradient norms from step `first` on, and the weights after the last one, by name."""

    loss: list[float]
    norm: list[float]
    weights: dict[str, Tensor] = field(default_factory=dict)
    first: int = 1


@dataclass
class Outcome:
    """Of a training of the twin. rows: by step, from all ranks; reason: of a failure; refused: it cannot run here."""

    job: StrategyJob
    directory: Path
    log: Path
    curves: Curves
    rows: dict[int, Counter[str]]
    reason: str = ""
    refused: bool = False


@dataclass
class Verdict:
    """Of a strategy. largest: relative difference by check, None without one; reason: why it does not run."""

    job: StrategyJob
    findings: list[Finding] = field(default_factory=list)
    largest: dict[str, float | None] = field(default_factory=dict)
    reason: str = ""
    refused: bool = False
    seconds: float = 0.0

    @property
    def answer(self) -> str:
        return "cannot run" if self.refused else "FAIL" if self.findings or self.reason else "PASS"

    def status(self, check: str) -> str:
        if any(finding.kind == check for finding in self.findings):
            return "FAIL"
        return "PASS" if check in self.largest else "not judged"


class Proof:
    """The runs of a twin below `twin.folder`, and what they are compared with.

    Attributes:
        expected: of the plain loop, or of one process where no loop computes the task.
        rounding: what other rounding changes in it.
        lower: the same in the recipe's precision; None if that is fp32, or without a loop.
    """

    def __init__(self, processes: Processes, twin: Twin):
        self._processes, self.twin, self.console = processes, twin, TextConsole()
        self.lower: tuple[Curves, Differences] | None = None
        if twin.why_not_looped:
            why = "the plain loop does not compute it; compared with one process of this trainer"
            twin.not_judged.append(f"{twin.why_not_looped}: {why}")
            self.expected = self._alone("reference", MICRO_BATCH)
            other = self._alone("other_rounding", 1)
        else:
            loops = {"weights": (), "other_rounding": ("--other-rounding",)}
            if twin.recipe.precision != "fp32":
                loops["lower"] = ("--products", DTYPES[twin.recipe.precision])
            with self.console.status("plain loop"), ThreadPoolExecutor() as pool:
                self.expected, other, *lower = pool.map(self._loop, loops, loops.values())
            if lower:
                self.lower = lower[0], compared(lower[0], self.expected)
        is_adapter = twin.recipe.adapter.name is not None
        self.start = self.weights_of(twin.folder / ("adapter" if is_adapter else "model"))
        self.rounding = compared(other, self.expected, self.start)

    def why_nothing_is_shown(self) -> str:
        """Return why agreement with the reference would show nothing; "" if it does."""
        if max(self.expected.norm) < LEAST_NORM:
            return f"all gradient norms are below {LEAST_NORM:g}: this model learns nothing, and any strategy agrees"
        if all(value.equal(self.start[name]) for name, value in self.expected.weights.items()):
            return "no weight moves: the learning rate is too small for fp32, or all weights are frozen"
        return ""

    def _loop(self, name: str, words: Sequence[str]) -> Curves:
        folder = self.twin.folder
        command = [sys.executable, str(folder / "judge.py"), *words, "--weights", str(folder / f"{name}.safetensors")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigurationError(f"{folder / 'judge.py'} failed:\n" + "\n".join(done.stderr.splitlines()[-3:]))
        records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        losses, norms = ([record[key] for record in records] for key in ("loss", "grad_norm"))
        return Curves(losses, norms, load_file(folder / f"{name}.safetensors"))

    def _alone(self, name: str, micro_batch: int) -> Curves:
        run = self.train(replace(_ALONE, name=name), "started", (f"batch.micro_batch_size={micro_batch}",))
        if run.reason:
            raise ConfigurationError(f"{self.twin.path}: in one process its twin ends: {run.reason}")
        return replace(run.curves, weights=self.weights_of(run.directory / "model"))

    def weights_of(self, folder: Path) -> dict[str, Tensor]:
        """Read an export back with transformers, or peft, alone."""
        model = reload.load(folder, TASKS[self.twin.recipe.task].auto_class, False)
        return {name: weight.detach() for name, weight in model.named_parameters()}

    def train(
        self, job: StrategyJob, kind: str, settings: Sequence[str] = (), killed: int = 0, before: Path | None = None
    ) -> Outcome:
        """Train the twin under a strategy, to its end or until it is killed.

        Args:
            kind: folder of the run, below that of the strategy.
            killed: the last step before the kill; 0 for none.
            before: run directory of the run that is gone on with.
        """
        directory, log = self.twin.folder / job.name / kind, self.twin.folder / job.name / f"{kind}.log"
        shutil.rmtree(directory, ignore_errors=True)
        if before is not None:
            shutil.copytree(before, directory, ignore=_KEPT)
        rows = self.twin.folder / job.name / f"{kind}_rows"
        shutil.rmtree(rows, ignore_errors=True)
        rows.mkdir(parents=True)
        words = [self.twin.path, *self.twin.settings, "precision=fp32", *settings, f"output_dir={directory}"]
        words += ["--strategy", str(job.path), "--num_processes", str(job.world_size)] if job.path else []
        log.unlink(missing_ok=True)
        with self.console.status(f"{job.name}: {kind}"):
            started = [job.world_size if job.path else 0, str(log), None, str(rows), str(killed), *words]
            code = self._processes.run(started)
        # ranks of one shard read the same rows, of which one counts
        of_shards: dict[tuple[int, int], Counter[str]] = {}
        for path in rows.glob("rank_*.jsonl"):
            for record in (record for _, record in scan(path) if record is not None):
                of_shards.setdefault((record["step"], record["shard"]), Counter(record["rows"]))
        of_steps: dict[int, Counter[str]] = {}
        for (step, _), keys in of_shards.items():
            of_steps[step] = of_steps.get(step, Counter()) + keys
        first, last = (SAVED + 1 if before else 1), killed or STEPS
        records = [record for record in iterate_metrics(directory) if record and first <= record["step"] <= last]
        losses, norms = ([record.get(key) or math.nan for record in records] for key in ("loss", "grad_norm"))
        outcome = Outcome(job, directory, log, Curves(losses, norms, first=first), of_steps)
        if len(records) < last - first + 1 or (code and not killed):
            code = exit_code_of(directory, log, code) if code else 0
            outcome.reason, outcome.refused = reason_of(directory, log, code), code == ConfigurationError.exit_code
        return outcome

    def judge(self, jobs: Sequence[StrategyJob]) -> list[Verdict]:
        """Judge in a ring: each strategy goes on from what the one before it left when it was killed."""
        verdicts, alive = [], []
        for job in jobs:
            verdict, run = self.judge_start(job)
            verdicts.append(verdict)
            if not verdict.reason:
                alive.append((verdict, run))
            if not verdict.reason and len(alive) > 1:
                self.judge_resume(verdict, alive[-2][1])
            if len(verdicts) > 1 or verdict.reason:
                self._report(verdict)
        if alive:
            self.judge_resume(alive[0][0], alive[-1][1])
            self._report(alive[0][0])
        return verdicts

    def _report(self, verdict: Verdict) -> None:
        world = verdict.job.world_size
        self.console.print(f"{verdict.job.name}, {world} process(es): {verdict.answer}, {verdict.seconds:.0f} s")

    def judge_start(self, job: StrategyJob) -> tuple[Verdict, Outcome]:
        """Train from the start until the kill, and a few steps in the recipe's precision."""
        verdict, began = Verdict(job), time.monotonic()
        run = self.train(job, "killed", killed=KILLED)
        verdict.reason, verdict.refused = run.reason, run.refused
        if not run.reason:
            self._judge_rows(verdict, run, "rows", "")
            _judge_curves(verdict, run.curves, ("loss", "norm"), (self.expected, self.rounding), "")
        if self.lower and not run.reason:
            name = self.twin.recipe.precision
            lower = self.train(job, name, (f"precision={name}",), killed=2)
            pairs = zip(lower.curves.loss, lower.curves.norm, strict=True)
            skips = any(math.isnan(norm) and not math.isnan(loss) for loss, norm in pairs)
            if lower.reason:
                verdict.findings.append(Finding("precision", 1, f"in {name} it ends: {lower.reason}"))
            elif name == "fp16" and skips:
                text = "fp16: the loss scale skips a step, and the plain loop has none"
                self.twin.not_judged += [] if text in self.twin.not_judged else [text]
            else:
                _judge_curves(verdict, lower.curves, ("precision", "precision"), self.lower, f"in {name}: ")
        verdict.seconds = time.monotonic() - began
        return verdict, run

    def judge_resume(self, verdict: Verdict, before: Outcome) -> None:
        """Go on from what another run left when it was killed, under this strategy, to the export."""
        began, where = time.monotonic(), f"after the kill of {before.job.name} on {before.job.world_size}: "
        run = self.train(verdict.job, "resumed", before=before.directory)
        if run.reason:
            verdict.findings.append(Finding("resume", SAVED + 1, f"{where}{run.reason}"))
        else:
            self._judge_rows(verdict, run, "resume", where)
            _judge_curves(verdict, run.curves, ("resume", "resume"), (self.expected, self.rounding), where)
            # the export, read back, beside the reference's weights; the run has compared its logits itself
            weights = self.weights_of(run.directory / "model")
            if same := _VERIFIED.search(run.log.read_text(encoding="utf-8")):
                verdict.largest["export"] = float(same[1])
            if names := sorted(weights.keys() ^ self.expected.weights.keys()):
                text = f"{len(names)} weights are in one of the two alone: {names[0]}"
                verdict.findings.append(Finding("export", STEPS, text))
            else:
                away = compared(Curves([], [], weights), self.expected, self.start).values["weights"][0]
                bound = self.rounding.bound("weights", 0)
                verdict.largest["weights"] = away
                if not away <= bound:
                    text = f"{away:.1e} of their change since the start away, rounding explains {bound:.1e}"
                    verdict.findings.append(Finding("weights", STEPS, text))
        verdict.seconds += time.monotonic() - began

    def _judge_rows(self, verdict: Verdict, run: Outcome, check: str, where: str) -> None:
        verdict.largest.setdefault(check, 0.0)
        for step, _ in enumerate(run.curves.loss, run.curves.first):
            rows, expected = run.rows.get(step, Counter()), self.twin.rows[step - 1]
            if rows != expected:
                lost, more = (expected - rows).total(), (rows - expected).total()
                text = f"{lost} of {expected.total()} rows of the step are not read, {more} are others or read twice"
                verdict.findings.append(Finding(check, step, where + text))
                return


def _judge_curves(
    verdict: Verdict, curves: Curves, checks: tuple[str, str], reference: tuple[Curves, Differences], where: str
) -> None:
    """Compare losses and norms with a reference's, within its rounding: the first step of each that is off counts."""
    expected, rounding = reference
    for kind, check in zip(("loss", "norm"), checks, strict=True):
        first_off = None
        for step, value in enumerate(getattr(curves, kind), curves.first):
            wanted, bound = getattr(expected, kind)[step - 1], rounding.bound(kind, step - 1)
            away = relative(value, wanted)
            verdict.largest[check] = max(verdict.largest.get(check) or 0.0, away)
            if not away <= bound and first_off is None:
                text = f"{kind} {value:.6g}, expected {wanted:.6g}: {away:.1e} away, rounding explains {bound:.1e}"
                first_off = Finding(check, step, where + text)
        verdict.findings += [first_off] if first_off else []


def compared(one: Curves, other: Curves, start: dict[str, Tensor] | None = None) -> Differences:
    """Compute relative differences of each step; those of the weights relative to their change since `start`."""
    values = {
        kind: [relative(*pair) for pair in zip(getattr(one, kind), getattr(other, kind), strict=True)]
        for kind in ("loss", "norm")
        if getattr(one, kind)
    }
    if start is not None:
        squares = [0.0, 0.0]
        for name, value in other.weights.items():
            squares[0] += (one.weights[name].double() - value.double()).square().sum().item()
            squares[1] += (value.double() - start[name].double()).square().sum().item()
        values["weights"] = [math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0]
    return Differences(values)


def run(path: str, given: Sequence[str], jobs: Sequence[StrategyJob], named: bool, output: Path) -> int:
    """Prove, print a table and what was found, write certificate.json and chart.svg. Returns 0 if all strategies pass.

    named: the strategies were asked for by name, so that one which cannot run here is a failure.
    """
    with storage_errors(output), Processes(OF_TWINS) as processes:
        twin = derive(path, given, output)
        proof = Proof(processes, twin)
        nothing = proof.why_nothing_is_shown()
        verdicts = [] if nothing else proof.judge([_ALONE, *(job for job in jobs if job.path)])
        content = certificate(proof, verdicts, nothing, named)
        write_json(output / "certificate.json", content)
        furthest = [max(verdict.largest.get(kind) or 0.0 for kind in ("loss", "resume")) for verdict in verdicts]
        curves = [Curve("one process" if twin.why_not_looped else "a plain loop", 0.0)]
        curves += [Curve(verdict.job.name, away) for verdict, away in zip(verdicts, furthest, strict=True)]
        bound = proof.rounding.bound("loss", STEPS - 1)
        write_text(output / "chart.svg", chart([*enumerate(proof.expected.loss, 1)], curves, Path(path).stem, bound))
    print()
    for kind, (trained, everything) in twin.trained.items():
        print(f"trained of {kind}: {trained:,} of {everything:,} tokens")
    for text in [*twin.problems, *([f"nothing can be shown: {nothing}"] if nothing else [])]:
        print(f"FAIL: {text}")
    if verdicts:
        heads = [*CHECKS[:-1], *([twin.recipe.precision] if proof.lower else [])]
        rows = [["strategy", "processes", *heads, ""]]
        for verdict in verdicts:
            shown = [(verdict.status(check), verdict.largest.get(check)) for check in CHECKS[: len(heads)]]
            cells = [f"{status} {value:.0e}" if value else status.replace("not judged", "-") for status, value in shown]
            rows.append([verdict.job.name, str(verdict.job.world_size), *cells, verdict.answer])
        print(aligned(rows))
    for verdict in verdicts:
        lines = [f"{finding.kind}, step {finding.step}: {finding.text}" for finding in verdict.findings]
        if verdict.reason:
            lines = [f"cannot run here: {verdict.reason}" if verdict.refused else verdict.reason]
        if lines:
            print(f"{verdict.job.name}: " + "\n  ".join(lines))
    print("".join(f"not judged: {text}\n" for text in twin.not_judged), end="")
    if content["model_card"]:
        print(f"for the model card: {content['model_card']}")
    names = ("certificate.json", "chart.svg", *([] if twin.why_not_looped else ["judge.py"]))
    print("  ".join(str(output / name) for name in names))
    return 0 if content["passes"] else 1


def certificate(proof: Proof, verdicts: Sequence[Verdict], nothing: str, named: bool) -> dict:
    """Return what was judged, for certificate.json."""
    twin, judged = proof.twin, [verdict for verdict in verdicts if named or not verdict.refused]
    passes = not nothing and not twin.problems and len(judged) > 1 and {one.answer for one in judged} == {"PASS"}
    digest, date = file_sha256(Path(shipped_file(twin.path))), utc_timestamp()
    names = ", ".join(verdict.job.name for verdict in judged)
    away = max((verdict.largest.get("loss") or 0.0 for verdict in judged), default=0.0)
    what = "one process" if twin.why_not_looped else "a plain loop of transformers and torch"
    line = f"A small twin of this recipe followed {what} under {names}, to {away:.0e} in the loss, also after a kill"
    always = ["the size of the model, and its pretrained weights", "dropout (switched off)", "evaluation", "GPUs"]
    always += [] if twin.why_not_looped else ["the shape of the schedule: the loop takes the recipe's rates"]
    return {
        "recipe": twin.path,
        "sha256": digest,
        "settings": twin.settings,
        "steps": STEPS,
        "date": date,
        "versions": versions(),
        "passes": passes,
        "shows_nothing": nothing,
        "judged_by": what,
        "trained_tokens": twin.trained,
        "problems": twin.problems,
        "strategies": [
            {
                "strategy": verdict.job.name,
                "processes": verdict.job.world_size,
                "answer": verdict.answer,
                "reason": verdict.reason,
                "checks": {check: verdict.status(check) for check in CHECKS},
                "differences": verdict.largest,
                "findings": [finding._asdict() for finding in verdict.findings],
                "seconds": round(verdict.seconds, 1),
            }
            for verdict in verdicts
        ],
        "not_judged": [*twin.not_judged, *always],
        "model_card": f"{line} (`samecurve prove`, {date[:10]}, sha256 {digest[:12]})." if passes else "",
    }
