"""Fit the planner's constants to a table of published runs, and print how well unseen runs are predicted.

    python scripts/fit_planner.py RUNS.csv            errors with each source left out
    python scripts/fit_planner.py RUNS.csv --write    also write samecurve/planner/profiles.json

A source is left out whole. The playbook's grid is one source of one stack, so it is also divided by the number of GPUs.
Intervals come from the residuals of runs that were left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from math import expm1
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from samecurve.planner import fitting, profiles, runs_file  # noqa: E402
from samecurve.planner.answers import situations  # noqa: E402
from samecurve.planner.fitting import Measured  # noqa: E402
from samecurve.planner.profiles import Profile  # noqa: E402

GRID = "Ultra-Scale Playbook grid"
MOST_TFLOPS = 2250  # a row that would need more of one GPU is a misprint
FEWEST_RESIDUALS = 12
MOST_OF_A_SOURCE = 60
EVERY_SLOW = 4  # of the slow runs one in so many is fitted, for speed


def measured(path: Path) -> list[Measured]:
    """Read the runs with a usable time or memory, and those that are slow for their stack's reasons."""
    found, slow = [], 0
    for row in runs_file.read(path):
        job = runs_file.job(row)
        seconds = float(row["step_s"]) if row["time_ok"] == "1" else None
        memory = float(row["memory_gib"]) if row["memory_ok"] == "1" else None
        weight = 1.0
        if seconds is None and row["note"].startswith("slow"):
            slow += 1
            if slow % EVERY_SLOW == 0:
                seconds, weight = float(row["step_s"]), fitting.SLOW_WEIGHT
        if seconds and _tflops(job, seconds) > job.card.matmul_tflops:
            print(f"{row['id']}: left out, {_tflops(job, seconds):.0f} TFLOP/s on a {job.gpu_kind} is a misprint")
            continue
        if seconds or memory:
            found.append(Measured(job, row["source"], seconds, memory, weight, row["status"] == "ran"))
    return found


def _tflops(job, seconds: float) -> float:
    tokens = job.tokens * job.grad_accum * job.layout.dp * job.layout.cp
    return 6 * job.shape.layers * job.shape.active_layer_parameters * tokens / seconds / job.layout.gpus / 1e12


def fit_default(runs: list[Measured]) -> Profile:
    """Fit the constants of an unknown stack to all stacks, with the same number of runs of each large source."""
    plain, by_source = [], defaultdict(list)
    for run in runs:
        if run.weight == 1:
            by_source[run.source].append(run)
    for several in by_source.values():
        plain += several[:: 1 + len(several) // MOST_OF_A_SOURCE]
    timed = [run for run in plain if run.seconds]
    default = fitting.fit(timed, Profile(), bounds=fitting.DEFAULT_BOUNDS)
    return _fit_memory([run for run in plain if run.memory_gib or run.ran], default)


def fit_all(runs: list[Measured], wanted: set[str]) -> dict[str, Profile]:
    """Fit the default to all stacks, then each wanted stack near the default."""
    default = fit_default(runs)
    found = {"default": default}
    for stack in sorted(wanted & {run.job.stack for run in runs}):
        mine = [run for run in runs if run.job.stack == stack]
        timed = [run for run in mine if run.seconds]
        held = [run for run in mine if run.memory_gib or (run.ran and run.weight == 1)]
        constants = fitting.fit(timed, default) if timed else default
        found[stack] = _fit_memory(held, constants) if held else constants
    return found


def _fit_memory(runs: list[Measured], start: Profile) -> Profile:
    return fitting.fit(runs, start, fitting.memory_error, fitting.CLIPPED_MEMORY, fitting.MEMORY_BOUNDS)


def left_out(runs: list[Measured]) -> list[tuple[Measured, bool, Profile]]:
    """Return each run with whether its stack was known, and the constants, of a fit without its source or region."""
    found = []
    folds = sorted({_fold(run) for run in runs})
    outs = [[run for run in runs if _fold(run) == fold] for fold in folds]
    with ProcessPoolExecutor() as pool:
        rests = [[run for run in runs if _fold(run) != fold] for fold in folds]
        fitted = pool.map(fit_all, rests, [{run.job.stack for run in out} for out in outs])
        for out, constants in zip(outs, fitted, strict=True):
            found += [(run, run.job.stack in constants, _pick(constants, run.job.stack)) for run in out]
    return found


def left_out_stacks(runs: list[Measured]) -> list[tuple[Measured, bool, Profile]]:
    """Return each run with the default constants of a fit without its stack."""
    found = []
    for stack in sorted({run.job.stack for run in runs}):
        default = fit_default([run for run in runs if run.job.stack != stack])
        found += [(run, False, default) for run in runs if run.job.stack == stack]
    return found


def _pick(constants: dict[str, Profile], stack: str) -> Profile:
    return constants.get(stack, constants["default"])


def _fold(run: Measured) -> str:
    return f"{run.source}: {run.job.layout.gpus} GPUs" if run.source == GRID else run.source


def show(title: str, errors: dict[str, list[float]]) -> None:
    print(f"\n{title}: median, 90 % quantile and signed median of predicted / measured - 1, in %")
    everything = [error for each in errors.values() for error in each]
    for name, values in [*errors.items(), ("all rows", everything)]:
        sizes = sorted(map(abs, values))
        high = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        middle, bias = statistics.median(sizes), statistics.median(values)
        print(f"{name[:78]:<78} {len(values):>4} {100 * middle:6.1f} {100 * high:6.1f} {100 * bias:+6.1f}")
    medians = [statistics.median(map(abs, values)) for values in errors.values()]
    print(f"{'mean of the medians':<78} {len(medians):>4} {100 * statistics.mean(medians):6.1f}")


def by_name(triples, name, error) -> dict[str, list[float]]:
    found = defaultdict(list)
    for run, _, constants in triples:
        found[name(run)].append(expm1(error(run, constants)))
    return dict(sorted(found.items()))


def residuals(triples, strangers, error) -> dict[str, list[float]]:
    """Return the 10 % and 90 % quantiles of log(measured / predicted) by situation.

    An unknown stack's come from stacks that were left out, each with the same weight.
    """
    found, by_stack = defaultdict(list), defaultdict(list)
    for run, known, constants in triples:
        for key in situations(run.job, known)[:2] if known else ():
            found[key].append(-error(run, constants))
    for run, _, constants in strangers:
        by_stack[run.job.stack].append(-error(run, constants))
    for values in by_stack.values():
        if len(values) > 1:
            found["unknown"] += statistics.quantiles(values, n=20, method="inclusive")
    result = {}
    for key, values in sorted(found.items()):
        if len(values) >= FEWEST_RESIDUALS:
            cuts = statistics.quantiles(values, n=10)
            result[key] = [round(cuts[0], 4), round(cuts[-1], 4)]
    return result


def report(label: str, triples, name) -> tuple[list, list]:
    """Print the errors of time and memory. Returns the runs with a measured time, and those with memory."""
    timed = [each for each in triples if each[0].seconds and each[0].weight == 1]
    held = [each for each in triples if each[0].memory_gib]
    show(f"step time, {label}", by_name(timed, name, fitting.time_error))
    show(f"peak memory, {label}", by_name(held, name, fitting.memory_error))
    return timed, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS.csv")
    parser.add_argument("--write", action="store_true", help="write the constants and the intervals' residuals")
    arguments = parser.parse_args()
    runs = measured(arguments.runs)
    constants = fit_all(runs, {run.job.stack for run in runs})
    report("in the fit", [(run, True, _pick(constants, run.job.stack)) for run in runs], lambda run: run.source)
    timed, held = report("source left out", left_out(runs), _fold)
    strange_timed, strange_held = report("stack left out", left_out_stacks(runs), lambda run: run.job.stack)
    if arguments.write:
        document = {
            "origin": f"scripts/fit_planner.py on {arguments.runs.name}, {len(runs)} runs",
            "stacks": {name: {k: round(v, 4) for k, v in asdict(each).items()} for name, each in constants.items()},
            "residuals": {
                "time": residuals(timed, strange_timed, fitting.time_error),
                "memory": residuals(held, strange_held, fitting.memory_error),
            },
        }
        profiles.PATH.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {profiles.PATH.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
