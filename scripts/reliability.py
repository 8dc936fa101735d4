"""Write benchmarks/reliability.md from what the fault battery did; no number in it comes from anywhere else.

    SAMECURVE_FAULT_RESULTS=benchmarks/faults/results.jsonl bash scripts/test.sh --full tests/faults \\
        tests/distributed/test_all_pairs.py
    python benchmarks/stock/faults.py
    python scripts/reliability.py

The battery adds a line for each fault, with the machine and the commit, so that it may run a part at a time; remove the
file first to begin anew. The second command is for the comparison with stock loops; without its results the page has
none.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.faults.page import page  # noqa: E402

RESULTS = ROOT / "benchmarks" / "faults" / "results.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS, help="default: %(default)s")
    parser.add_argument("--stock", type=Path, default=ROOT / "benchmarks" / "stock" / "results.json")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "reliability.md")
    arguments = parser.parse_args()
    records = [json.loads(line) for line in arguments.results.read_text(encoding="utf-8").splitlines()]
    if not records:
        parser.error(f"{arguments.results} is empty; see --help")
    stock = json.loads(arguments.stock.read_text(encoding="utf-8")) if arguments.stock.exists() else None
    arguments.output.write_text(page(records, stock), encoding="utf-8")
    print(arguments.output)


if __name__ == "__main__":
    main()
