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
from dataclasses import asdict
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


def fit_all(runs: list[Measured]) -> dict[str, Profile]:
    """Fit the default to all stacks, then each stack near the default."""
    timed = [run for run in runs if run.seconds]
    held = [run for run in runs if run.memory_gib or (run.ran and run.weight == 1)]
    default = fitting.fit([run for run in timed if run.weight == 1], Profile())
    default = _fit_memory(held, default)
    found = {"default": default}
    for stack in sorted({run.job.stack for run in runs}):
        mine = [run for run in timed if run.job.stack == stack]
        constants = fitting.fit(mine, default) if mine else default
        mine = [run for run in held if run.job.stack == stack]
        if mine:
            constants = _fit_memory(mine, constants)
        found[stack] = constants
    return found


def _fit_memory(runs: list[Measured], start: Profile) -> Profile:
    return fitting.fit(runs, start, fitting.memory_error, fitting.CLIPPED_MEMORY, fitting.MEMORY_BOUNDS)


def left_out(runs: list[Measured]) -> list[tuple[Measured, bool, Profile]]:
    """Return each run with whether its stack was known, and the constants, of a fit without its source or region."""
    found = []
    folds = sorted({_fold(run) for run in runs})
    for fold in folds:
        out = [run for run in runs if _fold(run) == fold]
        constants = fit_all([run for run in runs if _fold(run) != fold])
        found += [(run, run.job.stack in constants, _pick(constants, run.job.stack)) for run in out]
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
    from math import expm1

    found = defaultdict(list)
    for run, _, constants in triples:
        found[name(run)].append(expm1(error(run, constants)))
    return dict(sorted(found.items()))


def residuals(triples, error) -> dict[str, list[float]]:
    """Return the 10 % and 90 % quantiles of log(measured / predicted) by situation."""
    found = defaultdict(list)
    for run, known, constants in triples:
        miss = -error(run, constants)
        for key in situations(run.job, known)[:2] if known else situations(run.job, False):
            found[key].append(miss)
        if known:
            found["unknown"].append(miss)
    result = {}
    for key, values in sorted(found.items()):
        if len(values) >= FEWEST_RESIDUALS:
            cuts = statistics.quantiles(values, n=10)
            result[key] = [round(cuts[0], 4), round(cuts[-1], 4)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS.csv")
    parser.add_argument("--write", action="store_true", help="write the constants and the intervals' residuals")
    arguments = parser.parse_args()
    runs = measured(arguments.runs)
    constants = fit_all(runs)
    timed = [run for run in runs if run.seconds and run.weight == 1]
    held = [run for run in runs if run.memory_gib]
    inside = [(run, True, _pick(constants, run.job.stack)) for run in runs]
    outside = left_out(runs)
    for label, triples in (("in the fit", inside), ("left out", outside)):
        timed = [each for each in triples if each[0].seconds and each[0].weight == 1]
        held = [each for each in triples if each[0].memory_gib]
        name = _fold if label == "left out" else lambda run: run.source
        show(f"step time, {label}", by_name(timed, name, fitting.time_error))
        show(f"peak memory, {label}", by_name(held, name, fitting.memory_error))
    timed = [each for each in outside if each[0].seconds and each[0].weight == 1]
    held = [each for each in outside if each[0].memory_gib]
    if arguments.write:
        document = {
            "origin": f"scripts/fit_planner.py on {arguments.runs.name}, {len(runs)} runs",
            "stacks": {name: {k: round(v, 4) for k, v in asdict(each).items()} for name, each in constants.items()},
            "residuals": {
                "time": residuals(timed, fitting.time_error),
                "memory": residuals(held, fitting.memory_error),
            },
        }
        profiles.PATH.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {profiles.PATH.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
