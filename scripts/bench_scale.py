"""What one step, one save, one resume and the heartbeats cost outside the engine, by the number of ranks.

    python scripts/bench_scale.py [--ranks 2 4 8 16 32 64 128] [--output benchmarks/scale.md]
    python scripts/bench_scale.py --ranks 2 4 --no_page     # the numbers alone, for tests

The ranks are forked from one process, talk over gloo and share this machine's cores; their engine trains nothing. Bytes
and system calls are those that Linux counts for each process (/proc/self/io), so that they hold for any machine.
Milliseconds are those of a machine with fewer cores than ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.scale.heartbeats import count_heartbeats  # noqa: E402
from benchmarks.scale.operations import import_all, measure  # noqa: E402
from benchmarks.scale.page import report  # noqa: E402

HEARTBEAT_RANKS = (64, 128, 1024, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "scale.md")
    parser.add_argument("--no_page", action="store_true", help="print the numbers as JSON and write no page")
    arguments = parser.parse_args()
    if not Path("/proc/self/io").exists():
        sys.exit("/proc/self/io is not there: the bytes are counted by Linux, on other systems they are not known")
    import_all()
    load = os.getloadavg()[0]
    measured = {size: measure(size, show=not arguments.no_page) for size in arguments.ranks}
    if arguments.no_page:
        print(json.dumps(measured))
    else:
        with tempfile.TemporaryDirectory() as folder:
            beats = {size: count_heartbeats(Path(folder) / str(size), size) for size in HEARTBEAT_RANKS}
        text = report(measured, beats, load)
        arguments.output.write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
