"""The checkpoint with the best value of a metric (checkpoint.best)."""

from __future__ import annotations

from pathlib import Path

from samecurve.checkpoint.manifest import check_files, list_checkpoints
from samecurve.checkpoint.resume import read_state, state_problems
from samecurve.specs.tasks import BETTER
from samecurve.storage.atomic import write_json
from samecurve.storage.filesystem import FileSystem
from samecurve.storage.records import is_number


def find_best(fs: FileSystem, directory: Path, metric: str) -> Path | None:
    """Find the good checkpoint with the best value of the metric; None if none has the metric. For rank 0.

    best.json in `directory` gets its name and the value.
    """
    values = {}
    for folder in list_checkpoints(fs, directory):
        # hashes state.json, which has the metric, but not the weights: this follows every save
        damaged = check_files(fs, folder, small_only=True)
        value = None if damaged or state_problems(folder) else read_state(folder)["record"].get(metric)
        if value is not None and is_number(value):
            values[folder] = value
    if not values:
        return None
    choose = min if BETTER[metric] == "lower" else max  # of equal ones the first
    best = choose(reversed(values), key=values.__getitem__)
    write_json(directory / "best.json", {"checkpoint": best.name, metric: values[best]})
    return best
