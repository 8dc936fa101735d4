"""The results of scripts/full_run.py as a page."""

from __future__ import annotations

from collections import Counter

from benchmarks.markdown import table


def page(records: list[dict]) -> str:
    """The page, from the lines that `pytest --results` has written: starts, outcomes and remarks."""
    starts = {record["run"]: record for record in records if "commit" in record}
    outcomes = [record for record in records if "outcome" in record]
    newest = {record["test"]: record for record in outcomes}
    by_commit: dict[str, list[dict]] = {}
    for record in newest.values():
        by_commit.setdefault(starts[record["run"]]["commit"], []).append(record)
    rows = []
    for commit, tests in by_commit.items():
        counts = Counter(record["outcome"] for record in tests)
        dates = sorted({record["run"][:10] for record in tests})
        minutes = f"{sum(record['seconds'] for record in tests) / 60:,.0f}"
        numbers = [f"{counts[outcome]:,}" for outcome in ("passed", "failed", "skipped")]
        rows.append([*numbers, minutes, " to ".join(dict.fromkeys((dates[0], dates[-1]))), commit])
    remarks = {record["test"]: record["remark"] for record in records if "remark" in record}
    failures = []
    for record in (record for record in outcomes if record["outcome"] == "failed"):
        last = newest[record["test"]]
        passed = f"; passes at {starts[last['run']]['commit']}" if last["outcome"] == "passed" else ""
        remark = f"; {remarks[record['test']]}" if record["test"] in remarks else ""
        failures.append(f"- `{record['test']}` at {starts[record['run']]['commit']}{passed}{remark}")
    skipped = Counter(record["reason"] for record in newest.values() if record["outcome"] == "skipped")
    parts = [
        "# All tests",
        "Everything that `bash scripts/test.sh --full` runs, in as many pieces as it took, by each test's newest "
        "outcome. Made by `python scripts/full_run.py`. The minutes are those of all tests one after the other; two of "
        "them ran at a time.",
        table(["passed", "failed", "skipped", "minutes", "date", "commit"], rows),
        *(["Failed, at least once:", "\n".join(failures)] if failures else ["None failed."]),
    ]
    if skipped:
        reasons = [[str(number), reason] for reason, number in skipped.most_common()]
        parts += ["Skipped, with the reason:", table(["tests", "reason"], reasons)]
    machines = sorted({starts[record["run"]]["machine"] for record in newest.values()})
    return "\n\n".join([*parts, f"Machines: {'; '.join(machines)}."]) + "\n"
