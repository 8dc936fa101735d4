"""The results of scripts/full_run.py as a page."""

from __future__ import annotations

from collections import Counter

from benchmarks.full_run.log import KINDS
from benchmarks.markdown import table


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
