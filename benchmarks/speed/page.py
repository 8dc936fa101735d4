"""The results of scripts/bench_speed.py as a page: each machine's tables, with versions, commit and date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.markdown import table

WARM_UP = 6
"""Steps that are not counted: compilation, and what is allocated once."""
HEADING = f"""# Speed on a CPU, side by side

Measured by `python scripts/bench_speed.py`, whose numbers are in [speed/results.json](speed/results.json). A Llama of
13.8 million parameters, bf16, 8 rows of 512 tokens per step ([speed/](speed/)). The contestants take turns, each in
processes of its own; the first {WARM_UP} steps of each are not counted. Tokens/s are those of the median step, and the
median of the rounds. A ratio is to the first contestant in the same round: the median, the lowest and the highest. The
machines are rented and their neighbours noisy: a few hundredths say nothing.

`mfu` is by the convention 6 N + 12 L h s (attention over the full square), against the speed of matrix multiplication
alone, which every run measures for itself. samecurve has its defaults where nothing else is said: varlen attention, the
chunked head, memory that malloc keeps. The others have transformers' attention (sdpa) and malloc's defaults; the bare
loop of "What the framework itself costs" has what samecurve has.

The loss is that of the last step: of equal rows in equal order, except TRL's, which packs and orders a random choice of
the same samples itself, by its defaults; padded, its steps have as many samples as samecurve's rows. Trainer's learning
rate lags a step behind, from 0 on, so its loss does too. Shards are gathered in bf16, so their losses differ in the
fourth digit. Peak GiB is the most memory of one process in all rounds, with libraries, compilation and the export of
the trained model, which only samecurve makes."""


@dataclass(frozen=True)
class Measurement:
    """One table of one machine, as results.json keeps it.

    rows: name, tokens/s or seconds, ratio, the lowest and the highest, the loss, peak memory in GiB. With seconds there
    is no ratio, no loss and no memory (None).
    overrides: of every recipe. note: what a reader has to know besides. mfu: of the first contestant. peak_tflops: of
    matrix multiplication, the median over its rounds; None where that was not kept.
    """

    rows: list[list]
    rounds: int
    date: str
    commit: str | None
    cores: int
    versions: dict[str, str | None]
    overrides: list[str] = field(default_factory=list)
    note: str = ""
    mfu: float | None = None
    peak_tflops: float | None = None


Found = dict[str, dict[str, Measurement]]
"""By the table's name and the machine's processor."""


def page(found: Found, titles: Mapping[str, str], goals: Mapping[str, str]) -> str:
    """titles, goals: by the table's name, in the page's order."""
    parts = [HEADING]
    for name in titles:
        if name in found:
            parts += [f"## {titles[name]}", goals[name]]
            for device, each in found[name].items():
                parts += [f"### {device}, {each.cores} cores", _table(each), _circumstances(each)]
    return "\n\n".join(parts) + "\n"


def _table(found: Measurement) -> str:
    if found.mfu is None:
        rows = [[name, f"{median:.2f}", f"{low:.2f} to {high:.2f}"] for name, median, _, low, high, *_ in found.rows]
        return table(("", "seconds", "lowest and highest"), rows)
    rows = [
        [name, f"{rate:,.0f}", f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{loss:.4f}", f"{gib:.2f}"]
        for name, rate, ratio, low, high, loss, gib in found.rows
    ]
    return table(("", "trained tokens/s", "ratio", "lowest and highest", "loss", "peak GiB"), rows)


def _circumstances(found: Measurement) -> str:
    peak = f" of {found.peak_tflops:.2f} TFLOP/s" if found.peak_tflops else ""
    mfu = f"The first one's `mfu` is {found.mfu:.0%}{peak}. " if found.mfu else ""
    commit = f", commit {found.commit}" if found.commit else ""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
    changed = f" with {' '.join(found.overrides)}" if found.overrides else ""
    note = f"{found.note} " if found.note else ""
    measured = f"{found.rounds} rounds{changed} on {found.date}{commit}"
    return f"{note}{mfu}{measured}; {versions}."
