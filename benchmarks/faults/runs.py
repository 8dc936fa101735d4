"""Tables of runs that were killed, stopped and damaged."""

from __future__ import annotations

from collections import Counter

from benchmarks.faults.records import count, equal, grouped, is_kill, most_lost
from benchmarks.markdown import table

KINDS = {
    "kill": "SIGKILL of a rank, by phase",
    "random": "SIGKILL at a random time",
    "signal": "signals, a dead launcher",
    "hang": "stopped and deadlocked ranks",
    "disk": "full disk",
    "numbers": "NaN, loss spikes, differing replicas",
    "corruption": "damaged files",
}


def total(records: list[dict]) -> str:
    num_damaged = count(records, lambda r: r["kind"] == "corruption")
    lines = [
        ("kills injected", count(records, is_kill)),
        ("other faults injected", len(records) - count(records, is_kill) - num_damaged),
        ("files damaged", num_damaged),
        ("committed checkpoints lost", count(records, lambda r: r["checkpoint_lost"])),
        ("corruptions accepted", count(records, lambda r: r["corruption_accepted"])),
        ("hangs", count(records, lambda r: r["hung"])),
        ("processes left behind", sum(record["left_behind"] for record in records)),
        ("runs that did not end as the undisturbed one", count(records, lambda r: r["resumed_equal"] is False)),
        ("cases that failed in another way", count(records, lambda r: bool(r["failed"]))),
    ]
    return table(("", "number"), lines)


def by_strategy(records: list[dict]) -> str:
    header = (
        "strategy",
        "kills",
        "other faults",
        "checkpoints lost",
        "hangs",
        "left behind",
        "most steps lost",
        "equal",
    )
    rows = []
    for name, own in grouped(records, "strategy"):
        lost = [record["checkpoint_lost"] for record in own]
        kills = count(own, is_kill)
        hangs, left = count(own, lambda r: r["hung"]), sum(record["left_behind"] for record in own)
        rows.append((name, kills, len(own) - kills, sum(lost), hangs, left, most_lost(own), equal(own)))
    return table(header, rows)


def by_random(records: list[dict]) -> str:
    header = ("strategy", "kills", "of a rank", "of all", "of the launcher", "most steps lost", "mean", "equal")
    rows = []
    for name, own in grouped(records, "strategy"):
        victims = Counter(record["fault"].removeprefix("SIGKILL of ").split()[0] for record in own)
        mean = sum(record["lost_steps"] for record in own) / len(own)
        numbers = (victims["rank"], victims["all"], victims["launcher"])
        rows.append((name, len(own), *numbers, most_lost(own), f"{mean:.1f}", equal(own)))
    note = (
        "Saved every 10 steps; the run is started again after each kill until it is done. docs/full_run.md says how "
        "the tests themselves ended."
    )
    return f"{table(header, rows)}\n\n{note}"


def by_kind(records: list[dict]) -> str:
    rows = []
    for kind, title in KINDS.items():
        own = [record for record in records if record["kind"] == kind]
        if own:
            codes = sorted({str(r["exit_code"]) for r in own if r["exit_code"] is not None}, key=int)
            seconds = max(record["seconds"] for record in own)
            bad = count(own, lambda r: bool(r["failed"]) or r["hung"] or r["corruption_accepted"])
            rows.append((title, len(own), ", ".join(codes) or "-", f"{seconds:.0f}" if seconds else "-", bad))
    header = ("fault", "number", "exit codes in status.json", "longest run in seconds", "failed")
    return table(header, rows)
