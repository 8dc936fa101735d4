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
import re
import sys
from collections import Counter
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import description  # noqa: E402
from benchmarks.markdown import table  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "full_run.json", ROOT / "docs" / "full_run.md"
KINDS = ("passed", "failed", "errors", "skipped")


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


def parse(log: str) -> dict:
    """Read what both parts of a shard printed, which ran beside each other.

    Raises:
        SystemExit: a part did not reach its end.
    """
    ends = re.findall(r"^=+ (.*) in ([\d.]+)s .*=+$", log, re.MULTILINE)
    if len(ends) != 2:
        raise SystemExit(f"{len(ends)} of the two parts of the tests came to their end")
    counts = Counter({kind: 0 for kind in KINDS})
    for summary, _ in ends:
        found = {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", summary)}
        counts.update({"errors": found.pop("error", 0), **found})
    skipped = Counter()
    for number, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)$", log, re.MULTILINE):
        skipped[re.sub(r"^Skipped: ", "", reason)] += int(number)
    return {
        **{kind: counts[kind] for kind in KINDS},
        "failures": sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", log, re.MULTILINE))),
        "reasons": dict(skipped),
        "minutes": round(max(float(seconds) for _, seconds in ends) / 60),
    }


def page(results: dict) -> str:
    """The page, from the results by shard."""
    columns = ["part", *KINDS, "minutes", "date", "commit"]
    rows = [
        [shard, *(f"{found[kind]:,}" for kind in KINDS), str(found["minutes"]), found["date"], found["commit"]]
        for shard, found in sorted(results.items())
    ]
    count = int(next(iter(results)).split("/")[1])
    missing = [f"{part}/{count}" for part in range(1, count + 1) if f"{part}/{count}" not in results]
    failures = [
        f"- `{name}` in part {shard}{known(found, name)}"
        for shard, found in sorted(results.items())
        for name in found["failures"]
    ]
    skipped: Counter[str] = Counter()
    for found in results.values():
        skipped.update(found["reasons"])
    reasons = [[str(number), reason] for reason, number in skipped.most_common()]
    parts = [
        "# All tests",
        "Everything that `bash scripts/test.sh --full` runs, in parts of whole files (`--shard 2/4`). Made by "
        "`python scripts/full_run.py`. The minutes are those of the wall clock, with whatever else the machine did.",
        table(columns, rows),
        *(f"Part {shard}: {found['note']}." for shard, found in sorted(results.items()) if "note" in found),
        *([f"Not run yet: {', '.join(missing)}."] if missing else []),
        *(["Failed:", "\n".join(failures)] if failures else []),
        *(["Skipped, with the reason:", table(["tests", "reason"], reasons)] if reasons else []),
        "Machines: " + "; ".join(sorted({found["machine"] for found in results.values()})) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def known(found: dict, name: str) -> str:
    at, remark = (found.get(key, {}).get(name) for key in ("mended", "remarks"))
    return (f"; passes since {at}" if at else "") + (f"; {remark}" if remark else "")


if __name__ == "__main__":
    main()
