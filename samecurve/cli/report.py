"""Write an HTML page about a run: curves, results, sessions, configuration and environment.

Several runs are shown side by side, with what differs; of two, the page also says how far their losses are apart.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from samecurve.errors import ConfigurationError
from samecurve.reports.run_report import MOST_RUNS, render_run_page
from samecurve.reports.run_summary import Run
from samecurve.run.run_directory import RECORDS, REPORT
from samecurve.storage.atomic import write_text

_NAMED = 100  # characters of the other runs' names in the name of the page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="a run directory, or several to compare")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help=f"the page to write (default: RUN/{REPORT}; of several, RUN/report_RUN2.html)",
    )


def run(arguments: argparse.Namespace) -> int:
    directories = arguments.runs
    if len(directories) > MOST_RUNS:
        raise ConfigurationError(f"RUN: found {len(directories)} directories, but a report shows {MOST_RUNS} at most")
    runs = [read_run(directory) for directory in directories]
    path = arguments.html or directories[0] / REPORT
    if not arguments.html and len(runs) > 1:
        path = directories[0] / f"{path.stem}_{'_'.join(run.name for run in runs[1:])[:_NAMED]}{path.suffix}"
    write_text(path, render_run_page(runs))
    print(path)
    return 0


def read_run(directory: Path) -> Run:
    """Read a run. Raises ConfigurationError if the directory has none. What is damaged in it is left out."""
    if not any((directory / name).is_file() for name in RECORDS):
        raise ConfigurationError(f"{directory}: no run here (run.json, metrics.jsonl); give the output_dir of a run")
    return Run.read(directory)
