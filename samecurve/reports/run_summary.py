"""Content of a run directory as rows of text, which a report shows and compares."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from samecurve.metrics.console import duration, number, of_session, spaced
from samecurve.reports.chart import relative_difference
from samecurve.reports.history import History
from samecurve.run.run_directory import iterate_metrics
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
        history: summary of metrics.jsonl.
        facts: run.json of the last session that has one, {} if none has.
    """

    directory: Path
    status: dict
    known: list[SessionRecord]
    history: History

    @classmethod
    def read(cls, directory: Path) -> Run:
        status = read_status(directory / STATUS)
        known = sessions(directory)
        return cls(directory, status, known, History.read(directory, known[-1].start_step if known else 0))

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
    history = run.history
    steps = f"{history.last.get('step', 0):,} of {number(run.facts.get('recipe', {}).get('steps', NOT_KNOWN))}"
    rows = {"state": run.status.get("state", NOT_KNOWN), "steps": steps, "sessions": f"{len(run.known)}"}
    if history.num_damaged:
        rows["damaged lines of metrics.jsonl"] = f"{history.num_damaged}, left out"
    if "loss" in history.ends:
        rows["loss, first to last step"] = "{:.4f} to {:.4f}".format(*history.ends["loss"])
    if lowest := history.lowest("eval_loss"):
        rows["held-out loss, first to last"] = "{:.4f} to {:.4f}".format(*history.ends["eval_loss"])
        rows["held-out loss, lowest"] = f"{lowest[0]:.4f} (step {lowest[1]:,})"
    for name, value in history.evaluations.last.items():
        if name.startswith("eval_") and name != "eval_loss":
            label = f"held-out {spaced(name.removeprefix('eval_'))}, last"
            rows[label] = NOT_KNOWN if value is None else number(value)
    if history.last:
        seconds, saved = (history.totals.get(name, 0) for name in ("step_seconds", "save_stall_seconds"))
        rows[run.facts.get("counts", "tokens")] = number(history.totals.get("tokens", 0))
        rows["time in steps"] = duration(seconds)
        # medians, which the slow first step of a session does not affect
        for name, label, shown in (
            ("tokens_per_second", "tokens per second", "{:,.0f}"),
            ("tflops_per_device", "TFLOP/s per device", "{:,.3g}"),
            ("mfu", "MFU", "{:.2%}"),
            ("hfu", "HFU", "{:.2%}"),
        ):
            values = history.values(name)
            rows[f"{label}, median step"] = shown.format(statistics.median(values)) if values else NOT_KNOWN
        memory = [value for _, value in history.curves.get("peak_memory_gib", ()) if value is not None]
        waits = history.values("data_wait_fraction")
        rows["peak memory, rank 0"] = f"{max(memory):.2f} GiB" if memory else NOT_KNOWN
        rows["waiting for data, median step"] = f"{statistics.median(waits):.2%}" if waits else NOT_KNOWN
        foreseen = of_session(run.facts, run.history.session)  # {} where no prediction is shown
        rows |= {f"{name}, median" if name == "step" else name: text for name, text in foreseen.items()}
        rows |= {"prediction": run.facts["predicted"]["basis"]} if foreseen else {}
        rows["skipped steps"] = number(history.last.get("skipped_steps", NOT_KNOWN))
        if "recompilations" in history.last:
            rows["recompilations"] = f"{number(history.last['recompilations'])} (torch.compile, rank 0)"
        rows["waiting for checkpoints"] = f"{saved:,.2f} s ({saved / max(seconds + saved, 1e-9):.1%})"
    return rows


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


def aligned(columns: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    """List (key, value of each column) of all keys; "absent" stands for a missing key."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return [(key, *(column.get(key, "absent") for column in columns)) for key in keys]


def differences(columns: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    """List the rows of `aligned` whose values differ."""
    return [row for row in aligned(columns) if len(set(row[1:])) > 1]


def relative_losses(first: Run, second: Run) -> Iterator[tuple[int, float | None]]:
    """Yield (step, |second loss / first loss - 1|) of the steps that both runs have. Reads both files side by side."""
    here, there = (filter(None, iterate_metrics(run.directory)) for run in (first, second))
    other = next(there, None)
    for record in here:
        while other and other["step"] < record["step"]:
            other = next(there, None)
        if other and other["step"] == record["step"] and "loss" in record and "loss" in other:
            yield record["step"], relative_difference(other["loss"], record["loss"])
