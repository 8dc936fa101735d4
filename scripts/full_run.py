"""Write docs/full_run.md: what passed, failed and was skipped when all tests ran, a part of them at a time.

    bash scripts/test.sh --full --shard 2/4 -rfEs > shard2.log
    python scripts/full_run.py 2/4 shard2.log COMMIT

The result of each part is kept in benchmarks/full_run.json, from which the page is written. COMMIT is what was tested.
Who mends a failure runs the test again and adds the commit there, under "mended": {TEST: COMMIT}; what else is known of
one goes under "remarks": {TEST: TEXT}, and what is to be said of a whole part under "note".
Run it on the machine that ran the tests: hardware and versions are this machine's.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.full_run.log import parse  # noqa: E402
from benchmarks.full_run.page import page  # noqa: E402
from benchmarks.machine import description  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "full_run.json", ROOT / "docs" / "full_run.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shard", help="as in --shard, such as 2/4")
    parser.add_argument("log", type=Path, help="what scripts/test.sh printed")
    parser.add_argument("commit", help="the commit that was tested")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    found = parse(arguments.log.read_text(encoding="utf-8"))
    origin = {"commit": arguments.commit, "date": str(date.today()), "machine": description()}
    results[arguments.shard] = found | origin
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
