"""Content of a run directory as rows of text, which a report shows and compares."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.metrics.console import duration, number, spaced
from samecurve.metrics.predicted import of_session
from samecurve.reports.chart import relative_differences
from samecurve.reports.plot import column, is_finite
from samecurve.run.run_directory import metrics_lines
from samecurve.run.sessions import SessionRecord, sessions
from samecurve.run.status import STATUS, read_status

NOT_KNOWN = "not known"
# Keys of run.json: APART are shown in sections of their own, OF_THE_START differ between any two runs.
APART = ("recipe", "accelerate", "deepspeed", "data", "data_fingerprints", "predicted")
OF_THE_START = ("output_dir", "overrides", "started", "resumed_from", "start_step")


@dataclass(frozen=True)
class Run:
    """A run read from its directory.

    Attributes:
        status: content of status.json.
        known: the sessions of the run, oldest first.
        metrics: content of metrics.jsonl.
        num_damaged: damaged lines of metrics.jsonl, which are left out.
        facts: run.json of the last session that has one, {} if none has.
    """

    directory: Path
    status: dict
    known: list[SessionRecord]
    metrics: list[dict]
    num_damaged: int = 0

    @classmethod
    def read(cls, directory: Path) -> Run:
        status = read_status(directory / STATUS)
        return cls(directory, status, sessions(directory), *metrics_lines(directory))

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def facts(self) -> dict:
        return self.known[-1].facts if self.known else {}

    @property
    def state(self) -> str:
        """The state of the run, with its reason if there is one."""
        state, reason = self.status.get("state", NOT_KNOWN), self.status.get("reason")
        return f"{state}: {reason}" if reason else state


def results(run: Run) -> dict[str, str]:
    """List the results of a run by name, as text."""
    metrics = run.metrics
    done = metrics[-1]["step"] if metrics else 0
    steps = f"{done:,} of {number(run.facts.get('recipe', {}).get('steps', NOT_KNOWN))}"
    found = {"state": run.status.get("state", NOT_KNOWN), "steps": steps, "sessions": f"{len(run.known)}"}
    if run.num_damaged:
        found["damaged lines of metrics.jsonl"] = f"{run.num_damaged}, left out"
    found |= dict(_learned(metrics))
    if metrics:
        seconds = _values(metrics, "step_seconds")
        found["tokens"] = number(sum(_values(metrics, "tokens")))
        found["time in steps"] = duration(sum(seconds))
        found |= dict(_speed(metrics))
        found |= {f"{name}, median" if name == "step" else name: text for name, text in _foreseen(run).items()}
        found["skipped steps"] = number(metrics[-1].get("skipped_steps", NOT_KNOWN))
        if "recompilations" in metrics[-1]:
            found["recompilations"] = f"{number(metrics[-1]['recompilations'])} (torch.compile, rank 0)"
        saved = sum(_values(metrics, "save_stall_seconds"))
        found["waiting for checkpoints"] = f"{saved:,.2f} s ({saved / max(sum(seconds) + saved, 1e-9):.1%})"
    return found


def _learned(metrics: Sequence[dict]) -> Iterator[tuple[str, str]]:
    losses = _values(metrics, "loss")
    if losses:
        yield "loss, first to last step", f"{losses[0]:.4f} to {losses[-1]:.4f}"
    held_out = [(value, step) for step, value in column(metrics, "eval_loss") if is_finite(value)]
    if held_out:
        best, step = min(held_out)
        yield "held-out loss, first to last", f"{held_out[0][0]:.4f} to {held_out[-1][0]:.4f}"
        yield "held-out loss, lowest", f"{best:.4f} (step {step:,})"
    last = next((record for record in reversed(metrics) if "eval_loss" in record), {})
    for name, value in last.items():
        if name.startswith("eval_") and name != "eval_loss":
            yield f"held-out {spaced(name.removeprefix('eval_'))}, last", NOT_KNOWN if value is None else number(value)


def _speed(metrics: Sequence[dict]) -> Iterator[tuple[str, str]]:
    """Yield throughput as medians, which the slow first step of a session does not affect."""
    for name, label, shown in (
        ("tokens_per_second", "tokens per second", "{:,.0f}"),
        ("tflops_per_device", "TFLOP/s per device", "{:,.3g}"),
        ("mfu", "MFU", "{:.2%}"),
        ("hfu", "HFU", "{:.2%}"),
    ):
        values = _values(metrics, name)
        yield f"{label}, median step", shown.format(statistics.median(values)) if values else NOT_KNOWN
    memory, waits = _values(metrics, "peak_memory_gib"), _values(metrics, "data_wait_fraction")
    yield "peak memory, rank 0", f"{max(memory):.2f} GiB" if memory else NOT_KNOWN
    yield "waiting for data, median step", f"{statistics.median(waits):.2%}" if waits else NOT_KNOWN


def _foreseen(run: Run) -> dict[str, str]:
    """Compare the last session with its prediction; {} where none is shown."""
    compared = of_session(run.facts, run.metrics)
    return {**compared, "prediction": run.facts["predicted"]["basis"]} if compared else {}


def _values(metrics: Sequence[dict], name: str) -> list[float]:
    return [value for _, value in column(metrics, name) if is_finite(value)]


def parts(run: Run) -> dict[str, dict[str, str]]:
    """List the run's configuration and environment by part, as dotted keys with text values, without its name."""
    facts = run.facts
    recipe = {name: value for name, value in facts.get("recipe", {}).items() if name not in OF_THE_START}
    files = {name: facts[name] for name in ("accelerate", "deepspeed") if facts.get(name)}
    data = {name: facts[name] for name in ("data", "data_fingerprints") if facts.get(name)}
    around = {name: value for name, value in facts.items() if name not in (*APART, *OF_THE_START)}
    named = {"recipe": recipe, "strategy files": files, "data": data, "environment": around}
    return {name: dict(flattened(content)) for name, content in named.items()}


def flattened(content: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", text(value)


def text(value: object) -> str:
    """Format a value as JSON, but strings unchanged and empty values as a dash."""
    if isinstance(value, str):
        return value
    return "-" if value in (None, [], {}) else json.dumps(value)


def differences(first: dict[str, str], second: dict[str, str]) -> list[tuple[str, str, str]]:
    """List (key, first value, second value) of all keys that differ; "absent" stands for a missing key."""
    keys = list(dict.fromkeys([*first, *second]))
    pairs = [(key, first.get(key, "absent"), second.get(key, "absent")) for key in keys]
    return [pair for pair in pairs if pair[1] != pair[2]]


def relative_losses(first: Run, second: Run) -> list[tuple[int, float | None]]:
    """List (step, |second loss / first loss - 1|) of the steps that both runs have."""
    there = dict(column(second.metrics, "loss"))
    pairs = [(step, value, there[step]) for step, value in column(first.metrics, "loss") if step in there]
    values = relative_differences([other for _, _, other in pairs], [own for _, own, _ in pairs])
    return [(step, value) for (step, _, _), value in zip(pairs, values, strict=True)]
