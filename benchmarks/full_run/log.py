"""What scripts/test.sh printed, as the result of a part."""

from __future__ import annotations

import re
from collections import Counter

KINDS = ("passed", "failed", "errors", "skipped")


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
