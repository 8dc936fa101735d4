"""The measurements of scripts/bench_checkpoint.py as a page."""

from __future__ import annotations

import os
import platform
from datetime import date

from benchmarks.checkpoint.runs import FILE_MIB, PAIRS
from benchmarks.machine import commit
from samecurve.specs.environment import versions


def report(hashed: tuple[float, float], saves: list[dict]) -> str:
    rows = "\n".join(
        f"| {each['strategy']} | {each['step']:.2f} | {each['beside']:.3f} | {each['waiting']:.3f} | "
        f"{each['beside'] / each['waiting']:.2f} |"
        for each in saves
    )
    found = {name: version for name, version in versions().items() if version and name != "samecurve"}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"""# What a checkpoint costs

Measured on {date.today()} at {commit("benchmarks/checkpoint.md")} by `python scripts/bench_checkpoint.py`:
{os.cpu_count()} cores ({platform.machine()}), no GPU, gloo, a local disk; {listed}.

A rank's file of {FILE_MIB} MiB with its sha256 is written at {hashed[0]:,.0f} MiB/s, in {hashed[1]:.2f} times the time
that it takes without (median of {PAIRS} pairs in turn).

Two processes, a 45 M Llama, 541 MB per checkpoint; seconds, medians. *In the background*, training waits for the copy
to host memory; what the step after it waits for the write itself, where that is longer than a step, is not in it.
`checkpoint.background: false` waits for the commit.

| strategy | a step | training waits, `background: true` | training waits, `background: false` | ratio |
|---|---|---|---|---|
{rows}
"""
