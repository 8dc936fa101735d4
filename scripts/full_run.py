"""Write docs/full_run.md: what passed, failed and was skipped when all tests ran, however many pieces it took.

    bash scripts/test.sh --full --results=benchmarks/full_run.jsonl
    python scripts/full_run.py

The first command goes on where it was ended, and repeats what failed; remove the file first to begin anew. What is
known of a failure goes into the file as a line of its own: {"test": TEST, "remark": TEXT}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.full_run import page  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "full_run.jsonl", ROOT / "docs" / "full_run.md"


def main() -> None:
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    PAGE.write_text(page([json.loads(line) for line in lines]), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
