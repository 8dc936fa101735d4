"""Tables of lost hosts, an object store's failing requests, each operation of a save, and moves between strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from benchmarks.faults.records import grouped, when
from benchmarks.markdown import table

REQUEST_FAULTS = {
    "error": "500 before the server acted",
    "late error": "500 after the server had acted",
    "throttled": "503 SlowDown",
    "lost": "no answer after the server had acted",
    "cut": "connection cut in the middle",
    "flipped": "a bit flipped on the way",
    "killed": "SIGKILL of the process before the server acted",
    "killed after": "SIGKILL of the process after the server had acted",
}


def by_host(records: list[dict]) -> str:
    header = (
        "second host",
        "times",
        "most steps lost",
        "mean",
        "seconds until the next step",
        "seconds to take it back",
    )
    rows = []
    for fault, own in grouped(records, "fault"):
        lost = [record["lost_steps"] for record in own]
        mean = f"{sum(lost) / len(own):.1f}"
        seconds = (in_words(record[key] for record in own) for key in ("seconds_alone", "seconds_together"))
        rows.append((fault, len(own), max(lost), mean, *seconds))
    at_return = max(record["lost_steps_at_return"] for record in records)
    ended = "as" if all(record["resumed_equal"] for record in records) else "not as"
    note = (
        "Two hosts with a process each, by the commands of `launch --min_nodes 1`, saved every 10 steps. Seconds: the "
        "mean, and the longest in brackets, from the loss to the first step of the first host alone, and from the "
        "return of the second one to the first step of both; most of it is torchrun's meeting and the start. A cut "
        f"cable is noticed by `watchdog.timeout_seconds`, here 60. At a return at most {at_return} steps were lost. "
        f"The run ended {ended} an undisturbed one, by losses and gradient norms."
    )
    return f"{table(header, rows)}\n\n{note}"


def in_words(seconds: Iterable[float]) -> str:
    found = list(seconds)
    return f"{sum(found) / len(found):.0f} ({max(found):.0f})"


def by_request(records: list[dict]) -> str:
    broken = sum((Counter(record["faults"]) for record in records), Counter())
    rows = [(title, broken[way]) for way, title in REQUEST_FAULTS.items() if broken[way]]
    sums = {key: sum(r[key] for r in records) for key in ("requests", "commits", "given_up", "lost", "accepted")}
    results = [
        ("sessions", len(records)),
        ("checkpoints committed in the store", sums["commits"]),
        ("uploads and starts given up until the next try", sums["given_up"]),
        ("committed checkpoints lost", sums["lost"]),
        ("damaged or partial checkpoints accepted", sums["accepted"]),
        ("unfinished uploads left behind by a session that ended", sum(r["unfinished"] for r in records)),
    ]
    note = (
        f"moto's S3 server behind a proxy that breaks requests at random: {broken.total():,} of {sums['requests']:,} "
        "here. A session fetches the newest checkpoint, often on another machine, commits three of 11 MiB and uploads "
        "each in parts. After each session every checkpoint with a marker is read and compared with what was saved, "
        "and the newest one is fetched, also while requests fail. Lost counts checkpoints whose upload had come to its "
        "end. A marker that a killed process left damaged is not one of them: the fetch takes the checkpoint before "
        f"it, and the next session uploads it again. Run {when(records)}."
    )
    return f"{table(('', 'number'), results)}\n\n{table(('request', 'number'), rows)}\n\n{note}"


def by_operation(records: list[dict]) -> str:
    rows = []
    for fault in dict.fromkeys(record["fault"] for record in records):
        own = [record for record in records if record["fault"] == fault]
        rows.append((fault, sum(r["cases"] for r in own), sum(r["violations"] for r in own)))
    rows.append(("all", sum(r["cases"] for r in records), sum(r["violations"] for r in records)))
    note = (
        "Two ranks save on a file system in memory that keeps what was not synced apart. One case: the fault at one "
        "operation of one save. After it, and after every power cut that could follow, each committed checkpoint is "
        "there and whole, no other is accepted, and the next session saves."
    )
    return f"{table(('fault', 'cases', 'committed checkpoints lost or others accepted'), rows)}\n\n{note}"


def by_pair(records: list[dict]) -> str:
    header = ("resumed under", "processes", "from checkpoints", "not read bit for bit", "loss", "gradient norm")
    rows = [
        (r["strategy"], r["world"], r["sources"], r["unequal"], f"{r['loss']:.1e}", f"{r['norm']:.1e}")
        for r in sorted(records, key=lambda r: ("LoRA" in r["strategy"], r["strategy"], r["world"]))
    ]
    note = (
        f"{sum(record['sources'] for record in records):,} pairs: the checkpoints are those of all rows of this table "
        "(LoRA from LoRA). Loss and gradient norm: the largest relative difference from an undisturbed single process "
        "in the 5 steps after it, fp32."
    )
    return f"{table(header, rows)}\n\n{note}"
