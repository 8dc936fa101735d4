"""Write benchmarks/bf16.md: bytes and copies of bf16 training that a CPU can count, before and after.

    python scripts/bench_bf16.py [--output FILE]

Everything is counted, nothing timed, so that a busy machine gives the same page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bf16 import page  # noqa: E402

PAGE = ROOT / "benchmarks" / "bf16.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    arguments.output.write_text(page(), encoding="utf-8")
    print(arguments.output)


if __name__ == "__main__":
    main()
