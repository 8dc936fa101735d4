"""What a checkpoint costs on this machine: hashing while writing, and training that waits for a copy or the disk.

    python scripts/bench_checkpoint.py [--output benchmarks/checkpoint.md]

Everything is measured side by side in one run: pairs in turn, medians, ratios.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.checkpoint import hashing, report, saving  # noqa: E402

STRATEGIES = ("ddp", "fsdp", "zero1", "zero3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "checkpoint.md")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        text = report(hashing(Path(folder)), [saving(name, Path(folder)) for name in STRATEGIES])
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
