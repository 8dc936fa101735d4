"""Counts which of many strategy files a silent recipe runs under, and why the others are refused: FOLDER.

FOLDER holds one folder per repository, with the Accelerate YAMLs and DeepSpeed JSONs of its files below it. Nothing is
trained: each file passes what `inspect` and train.py check first. benchmarks/strategy_files.md has what was measured.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.markdown import table
from samecurve.errors import SamecurveError
from samecurve.strategy.resolve import resolve_plan

# leaves precision, batch, optimizer and schedule to the file
RECIPE = """\
output_dir: runs/x
steps: 1000
task: sft
model: {config: {model_type: llama, num_hidden_layers: 8}}
tokenizer: {vocabulary_size: 512}
data: {path: text.txt, chat: false}
batch: {sequence_length: 64}
"""
KINDS = ("YAML", "JSON")
RUNS = ((True, False), (True,))
SUFFIXES = {".yaml", ".yml", ".json", ".conf"}


def outcome(path: Path, work: Path) -> str:
    """Return "" if a run under the file would start, on its number of processes or a usual one, else the problems."""
    report, asked = "", re.search(r"^num_processes: *(\d+)", path.read_text(errors="replace"), re.MULTILINE)
    for size in (int(asked[1]) if asked else 2, 1, 8, 16):
        environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        try:
            resolve_plan([str(work / "recipe.yaml"), "--strategy", str(path)], environ if size > 1 else {})
        except SamecurveError as error:
            report = report or str(error)
        else:
            return ""
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    counts: dict[str, Counter] = {}
    reports: dict[Path, str] = {}
    with TemporaryDirectory() as name:
        work = Path(name)
        (work / "recipe.yaml").write_text(RECIPE)
        (work / "text.txt").write_text("words")
        os.chdir(work)
        for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
            relative = path.relative_to(folder)
            report = outcome(path, work)
            kind = "YAML" if path.suffix in (".yaml", ".yml") else "JSON"
            counts.setdefault(relative.parts[0], Counter())[kind, not report] += 1
            if report:
                reports[relative] = report
    rows = [
        [repository.replace("+", "/"), *(sum(count[kind, runs] for runs in each) for kind in KINDS for each in RUNS)]
        for repository, count in counts.items()
    ]
    print(table(["repository", "YAMLs", "of these run", "JSONs", "of these run"], rows))
    for path, report in reports.items():
        print(f"\n{path}\n{report}")


if __name__ == "__main__":
    main()
