"""benchmarks/scale.md, from what was counted with some numbers of ranks and what follows for larger ones."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable
from datetime import date

from benchmarks.machine import commit
from benchmarks.markdown import table
from benchmarks.scale.operations import PARAMETERS, RANKS_PER_HOST, VALUES

LARGE = (1024, 16384)
FORMS: dict[str, Callable[[float], float]] = {
    "": lambda size: 0.0,
    "/ N": lambda size: 1 / size,
    "log2(N)": lambda size: math.log2(size),
    "N": lambda size: size,
    "N^2": lambda size: size**2,
}
TOLERANCE, USELESS = 0.05, 0.5


def fit(points: dict[int, float], forms: dict = FORMS) -> tuple[str, Callable[[float], float]]:
    """Fit a + b f(N), with the first of the forms f that is within 5 % of all points, else with the closest one."""
    import numpy as np

    sizes, values = np.array(list(points)), np.array(list(points.values()))
    fits = []
    for name, form in forms.items():
        columns = np.array([[1.0, form(size)] if name else [1.0] for size in sizes])
        weights = 1 / np.maximum(values, max(values.max() / 20, 1e-9))  # relative errors, of small values less so
        found, *_ = np.linalg.lstsq(columns * weights[:, None], values * weights, rcond=None)
        error = np.abs((columns @ found - values) * weights).max()
        a, b = float(found[0]) + 0.0, float(found[1]) if name else 0.0
        fits.append((error, name, a, b, form))
    best = next((each for each in fits if each[0] < TOLERANCE), min(fits, key=lambda each: each[0]))
    error, name, a, b, form = best
    if error > USELESS:
        return "none", lambda size: math.nan
    text = f"{a:,.0f} + {b:,.3g} {name}" if name else f"{a:,.0f}"
    text += f", {error:.0%} off" if error >= TOLERANCE else ""
    return text, lambda size: a + b * form(size)


def extrapolated(value: float) -> str:
    return "no fit" if math.isnan(value) else f"{value:,.0f}"


OPERATIONS = {
    "group": "create a group",
    "group, all connected": "the same, as gloo does by default",
    "step": "a step: does anybody want to stop?",
    "tokens": "a step: how many tokens?",
    "save": "a save",
    "save, by all_gather_object": "the same, by `all_gather_object`",
    "find": "find and verify a checkpoint",
    "load": "load it (200 parameters)",
}


def sent_table(measured: dict[int, dict]) -> str:
    sizes = [*measured]
    rows = []
    for key, name in OPERATIONS.items():
        for who in ("rank 0", "another rank"):
            points = {size: sent(found[key], size, who) for size, found in measured.items()}
            text, fitted = fit(points)
            # the store answers some ranks after it was counted, and each time a different number of them
            large = ["", "", ""] if key == "group" else [*(extrapolated(fitted(size)) for size in LARGE), f"`{text}`"]
            rows.append([name, who, *(f"{points[size]:,.0f}" for size in sizes), *large])
    return table(["", "", *map(str, sizes), *(f"{size:,} (fit)" for size in LARGE), "fit"], rows)


def sent(found: dict, size: int, who: str) -> float:
    """Bytes sent by rank 0, or by another rank on average."""
    others = (found["sent"]["all"] - found["sent"]["rank 0"]) / (size - 1)
    return found["sent"]["rank 0"] if who == "rank 0" else others


def connection_table(measured: dict[int, dict]) -> str:
    """Those of the group that steps use and of the group that saves use, after both have been used."""
    rows = [
        [who, *(f"{found['connections']['sent'][key]:,}" for found in measured.values())]
        for who, key in {"rank 0": "rank 0", "the other rank with most": "each"}.items()
    ]
    return table(["", *map(str, measured)], rows)


def read_table(measured: dict[int, dict]) -> str:
    rows = [
        [name, *(f"{found[key]['read']['all']:,.0f}" for found in measured.values())]
        for key, name in {"files": "the files of the checkpoint", "find": OPERATIONS["find"]}.items()
    ]
    return table(["", *map(str, measured)], rows)


def time_table(measured: dict[int, dict]) -> str:
    names = {"step": "a step: what the loop waits", "step, waited for": "a step: until the answer is there"}
    names |= {"tokens": "tokens, asked for when the step begins", "tokens, ahead": "tokens, asked for a step ahead"}
    names |= {"save, its messages": "a save: its messages", "save, by all_gather_object": "by `all_gather_object`"}
    names |= {"save": "a save, until it is committed", "find": OPERATIONS["find"]}
    rows = []
    for key, name in names.items():
        points = {size: found[key]["ms"] for size, found in measured.items()}
        _, fitted = fit(points, {name: FORMS[name] for name in ("", "N")})
        large = ["" if key == "save" else extrapolated(fitted(size)) for size in LARGE]
        rows.append([name, *(f"{value:,.2f}" for value in points.values()), *large])
    return table(["ms", *map(str, measured), *(f"{size:,} (fit)" for size in LARGE)], rows)


def heartbeat_table(beats: dict[int, dict]) -> str:
    rows = [
        [
            who,
            *(
                f"{found[who][0]:,} files, {found[who][1] / 1024:,.0f} KiB, {found[who][2]:,.1f} ms"
                for found in beats.values()
            ),
        ]
        for who in next(iter(beats.values()))
    ]
    return table(["per look", *(f"{size:,}" for size in beats)], rows)


def report(measured: dict[int, dict], beats: dict[int, dict], load: float) -> str:
    from samecurve.specs.environment import processor, version

    return f"""# The cost of everything but the engine, by number of ranks

Measured on {date.today()} by `python scripts/bench_scale.py`: {os.cpu_count()} cores ({processor()}), gloo over the
loopback interface, torch {version("torch")}, Python {platform.python_version()}, commit
{commit("benchmarks/scale.md")}. The machine's load was {load:.1f} when it began; counts do not depend on it.

The ranks are forked from one process. Their engine holds {VALUES} values of each of {PARAMETERS} parameters and trains
nothing.

Bytes are counted by Linux for each process (`/proc/self/io`), with gloo's own messages and without the files of a
checkpoint. The columns after the measured ones are extrapolated by the fit: constant, or with a multiple of 1/N,
log2(N), N or N^2, whichever is the first within {TOLERANCE:.0%} of all points. Where none is, the closest one is taken
and its largest error given, and above {USELESS:.0%} none.

## Bytes sent

{sent_table(measured)}

The answer to a step's question goes through all ranks in turn, in the background: the bytes per rank stay the same, the
time until it is there is proportional to the number of ranks. What rank 0 sends at a load is to each rank its part of
the index: which rank's file has which part of a parameter.

## Open sockets of the two control groups

{connection_table(measured)}

## Bytes read from files when a checkpoint is found, all ranks together

{read_table(measured)}

## Milliseconds

All ranks share {os.cpu_count()} cores and one disk, so that these times grow faster than those of a cluster. They are
extrapolated in proportion to N; a save until it is committed is not, because it is the disk's time.

{time_table(measured)}

## Heartbeats

A rank looks every 5 seconds; {RANKS_PER_HOST} ranks per host. Nothing is extrapolated: the files of so many ranks were
written to a local disk, and three of the ranks looked at them. Up to 64 ranks, rank 0 reads all files, and every rank
does before it takes something for a hang.

{heartbeat_table(beats)}
"""
