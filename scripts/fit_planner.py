"""Fit the planner's constants to a table of published runs, and print how well unseen runs are predicted.

    python scripts/fit_planner.py RUNS.csv            errors with each source left out
    python scripts/fit_planner.py RUNS.csv --write    also write samecurve/planner/profiles.json
    python scripts/fit_planner.py RUNS.csv --page     also write benchmarks/planner.md and its picture

A source is left out whole. The playbook's grid is one source of one stack, so it is also divided by the number of GPUs.
Intervals come from the residuals of runs that were left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from math import expm1
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.planner import figures, fits, page, picture  # noqa: E402
from benchmarks.planner.fits import LeftOut  # noqa: E402
from samecurve.planner import answers, hardware  # noqa: E402
from samecurve.planner.hardware import canonical  # noqa: E402

PAGE, PICTURE = ROOT / "benchmarks" / "planner.md", ROOT / "benchmarks" / "planner.svg"


def report(label: str, runs: Sequence[LeftOut], name: Callable[[LeftOut], str]) -> None:
    """Print the errors of time and memory."""
    _show(f"step time, {label}", _by(name, fits.timed(runs), "time_error"))
    _show(f"peak memory, {label}", _by(name, fits.held(runs), "memory_error"))


def _by(name: Callable[[LeftOut], str], runs: Iterable[LeftOut], error: str) -> dict[str, list[float]]:
    found = defaultdict(list)
    for each in runs:
        found[name(each)].append(expm1(getattr(each, error)))
    return dict(sorted(found.items()))


def _show(title: str, errors: dict[str, list[float]]) -> None:
    print(f"\n{title}: median, 90 % quantile and signed median of predicted / measured - 1, in %")
    everything = [error for each in errors.values() for error in each]
    for name, values in [*errors.items(), ("all rows", everything)]:
        middle, high, bias = figures.middle(values), figures.high(values), statistics.median(values)
        print(f"{name[:78]:<78} {len(values):>4} {100 * middle:6.1f} {100 * high:6.1f} {100 * bias:+6.1f}")
    medians = [figures.middle(values) for values in errors.values()]
    print(f"{'mean of the medians':<78} {len(medians):>4} {100 * statistics.mean(medians):6.1f}")


def write(runs: Sequence[LeftOut], strangers: Sequence[LeftOut], fitted: dict[str, hardware.Profile], name: str):
    """Write the constants and the intervals' residuals."""
    document = {
        "origin": f"scripts/fit_planner.py on {name}, {len(runs)} runs",
        "public": {
            "gpus": sorted({canonical(each.run.job.gpu_kind) for each in runs}),
            "most_gpus": max(each.run.job.dims.world_size for each in runs),
        },
        "stacks": {stack: {k: round(v, 4) for k, v in asdict(each).items()} for stack, each in fitted.items()},
        "residuals": {
            "time": fits.residuals(fits.timed(runs), fits.timed(strangers), "time_error"),
            "memory": fits.residuals(fits.held(runs), fits.held(strangers), "memory_error"),
        },
    }
    hardware.PATH.write_text(_rows(document) + "\n", encoding="utf-8")
    print(f"\nwrote {hardware.PATH.relative_to(ROOT)}")


def _rows(value: Any, indent: str = "") -> str:
    """Format JSON with a line for each stack and each interval."""
    if not isinstance(value, dict) or all(isinstance(each, float) for each in value.values()):
        return json.dumps(value)
    lines = [f"{indent} {json.dumps(key)}: {_rows(each, indent + ' ')}" for key, each in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS.csv")
    parser.add_argument("--write", action="store_true", help="write the constants and the intervals' residuals")
    parser.add_argument("--page", action="store_true", help="write the page of benchmarks/ and its picture")
    arguments = parser.parse_args()
    rows = answers.read_runs(arguments.runs)
    runs = fits.measured(rows)
    fitted = fits.fit_all(runs, {run.job.stack for run in runs})
    inside = [LeftOut(run, True, fits.pick(fitted, run.job.stack)) for run in runs]
    report("in the fit", inside, lambda each: each.run.source)
    constants = fits.constants_without(runs)
    outside = fits.left_out(runs, constants)
    report("source left out", outside, lambda each: fits.fold(each.run.source, each.run.job))
    strangers = fits.left_out_stacks(runs)
    report("stack left out", strangers, lambda each: each.run.job.stack)
    cases = figures.cases(rows, outside, strangers, constants)
    print("\n" + "\n".join(figures.summary(cases)))
    if arguments.write:
        write(outside, strangers, fitted, arguments.runs.name)
    if arguments.page:
        PAGE.write_text(page.page(cases, inside, PICTURE.name), encoding="utf-8")
        PICTURE.write_text(picture.draw(cases), encoding="utf-8")
        print(f"\nwrote {PAGE.relative_to(ROOT)} and {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
