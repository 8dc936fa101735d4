"""What a run of 10^4, 10^5 and 10^6 steps costs afterwards: a resume, its reports, a comparison.

    python scripts/bench_long_runs.py [--output benchmarks/long_runs.md]

The sizes are measured side by side in one run, each action in a process of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.long_runs import measure, page  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "long_runs.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = page(measure(Path(folder), print))
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
