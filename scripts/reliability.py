"""Write benchmarks/reliability.md from what the fault battery did; no number in it comes from anywhere else.

    SAMECURVE_FAULT_RESULTS=faults.jsonl bash scripts/test.sh --full tests/faults tests/distributed/test_all_pairs.py
    python benchmarks/stock/faults.py
    python scripts/reliability.py faults.jsonl

The second command is for the comparison with stock loops; without its results the page has none. Run the last one on
the machine that ran the others: hardware and versions are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers")
COMMANDS = """```bash
SAMECURVE_FAULT_RESULTS=faults.jsonl bash scripts/test.sh --full tests/faults tests/distributed/test_all_pairs.py
python benchmarks/stock/faults.py
python scripts/reliability.py faults.jsonl
```"""
# of a stock loop's case, from the best to the worst
OUTCOMES = ("same curve", "another curve", "started over", "does not start", "hung", "silently damaged")
KINDS = {
    "kill": "SIGKILL of a rank, by phase",
    "random": "SIGKILL at a random time",
    "signal": "signals, a dead launcher",
    "hang": "stopped and deadlocked ranks",
    "disk": "full disk",
    "numbers": "NaN, loss spikes, differing replicas",
    "corruption": "damaged files",
}
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

Row = Sequence[object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what $SAMECURVE_FAULT_RESULTS named while the tests ran")
    parser.add_argument("--stock", type=Path, default=ROOT / "benchmarks" / "stock" / "results.json")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "reliability.md")
    arguments = parser.parse_args()
    records = [json.loads(line) for line in arguments.results.read_text(encoding="utf-8").splitlines()]
    if not records:
        parser.error(f"{arguments.results} is empty; see the head of this file")
    stock = json.loads(arguments.stock.read_text(encoding="utf-8")) if arguments.stock.exists() else None
    arguments.output.write_text(page(records, stock), encoding="utf-8")
    print(arguments.output)


def page(records: list[dict], stock: dict | None) -> str:
    apart = ("pair", "unit", "host", "store")
    pairs, units, hosts, stores = ([r for r in records if r["kind"] == kind] for kind in apart)
    records = [r for r in records if r["kind"] not in apart]
    runs = [record for record in records if record["kind"] != "corruption"]
    parts = [
        "# What happens to a run that something happens to",
        total(records),
        f"Measured {when(records)}: {machine()}. Made by `scripts/reliability.py`; to run it again:",
        COMMANDS,
        "## Per strategy",
        by_strategy([record for record in runs if record["kind"] != "random"]),
        "Checkpoints are saved every 5 steps. Steps lost: those that had to be done again after the restart; in "
        "brackets how many of them had run while the next checkpoint was being written. Equal: started again, the run "
        "ended with the losses, gradient norms, weights, moments and random numbers of an undisturbed one, bit for "
        "bit.",
    ]
    if any(record["kind"] == "random" for record in runs):
        parts += ["## One run, killed at random times", by_random([r for r in runs if r["kind"] == "random"])]
    parts += ["## Per kind of fault", by_kind(records)]
    if hosts:
        parts += ["## A lost host", by_host(hosts)]
    if stores:
        parts += ["## An object store whose requests fail", by_request(stores)]
    if units:
        parts += ["## Every operation of a save", by_operation(units)]
    if pairs:
        parts += ["## From every checkpoint to every strategy", by_pair(pairs)]
    if stock is not None:
        parts += ["## The same faults against stock loops", against_stock(stock)]
    return "\n\n".join(parts) + "\n"


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
    for name in sorted({record["strategy"] for record in records}):
        own = [record for record in records if record["strategy"] == name]
        lost = [record["checkpoint_lost"] for record in own]
        kills = count(own, is_kill)
        hangs, left = count(own, lambda r: r["hung"]), sum(record["left_behind"] for record in own)
        rows.append((name, kills, len(own) - kills, sum(lost), hangs, left, most_lost(own), equal(own)))
    return table(header, rows)


def by_random(records: list[dict]) -> str:
    header = ("strategy", "kills", "of a rank", "of all", "of the launcher", "most steps lost", "mean", "equal")
    rows = []
    for name in sorted({record["strategy"] for record in records}):
        own = [record for record in records if record["strategy"] == name]
        victims = Counter(record["fault"].removeprefix("SIGKILL of ").split()[0] for record in own)
        mean = sum(record["lost_steps"] for record in own) / len(own)
        numbers = (victims["rank"], victims["all"], victims["launcher"])
        rows.append((name, len(own), *numbers, most_lost(own), f"{mean:.1f}", equal(own)))
    note = "Saved every 10 steps; the run is started again after each kill until it is done."
    return f"{table(header, rows)}\n\n{note}"


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
    for fault in sorted({record["fault"] for record in records}):
        own = [record for record in records if record["fault"] == fault]
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
        "each in parts. After each session every committed checkpoint is read and compared with what was saved, and "
        f"the newest one is fetched while requests fail. Run {when(records)}."
    )
    return f"{table(('', 'number'), results)}\n\n{table(('request', 'number'), rows)}\n\n{note}"


def in_words(seconds: Iterable[float]) -> str:
    found = list(seconds)
    return f"{sum(found) / len(found):.0f} ({max(found):.0f})"


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
    header = ("goes on under", "processes", "from checkpoints", "not read bit for bit", "loss", "gradient norm")
    rows = [
        (r["strategy"], r["world"], r["sources"], r["unequal"], f"{r['loss']:.1e}", f"{r['norm']:.1e}")
        for r in sorted(records, key=lambda r: ("LoRA" in r["strategy"], r["strategy"], r["world"]))
    ]
    note = (
        f"{sum(record['sources'] for record in records):,} pairs: the checkpoints are those of all rows of this table "
        "(LoRA from LoRA). Loss and gradient norm: the largest relative difference from an undisturbed single process "
        "in the 20 steps after it, fp32."
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


def against_stock(stock: dict) -> str:
    cases = stock["cases"]
    loops = list(dict.fromkeys(case["loop"] for case in cases))
    faults = list(dict.fromkeys(case["fault"] for case in cases))
    found = {(case["loop"], case["fault"]): case for case in cases}
    rows = [(fault, *(outcome(found.get((loop, fault))) for loop in loops)) for fault in faults]
    known = [name for name in OUTCOMES if any(case["outcome"] == name for case in cases)]
    others = sorted({case["outcome"] for case in cases} - {*known})
    summary = [(name, *(count(cases, in_loop(loop, name)) for loop in loops)) for name in [*known, *others]]
    lost = [max((c.get("steps_lost") or 0 for c in cases if c["loop"] == loop), default=0) for loop in loops]
    summary.append(("most steps lost", *lost))
    settings = stock["settings"]
    note = (
        f"{settings['processes']} processes, {settings['steps']} steps, saved every {settings['save_every']}, "
        f"{settings['keep']} kept; run {when(cases, 'date')} by `benchmarks/stock/faults.py`, whose loops say how "
        "each is configured and why. In brackets: steps lost, of starts that finished: who loads a damaged checkpoint "
        "or does not start loses fewer than who goes back to an older good one. File named: the output says which "
        "file is damaged. Swapped weights leave no good checkpoint, so refusing to start is right there."
    )
    return f"{table(('', *loops), summary)}\n\n{table(('fault', *loops), rows)}\n\n{note}"


def in_loop(loop: str, outcome_name: str) -> Callable[[dict], bool]:
    return lambda case: case["loop"] == loop and case["outcome"] == outcome_name


def outcome(case: dict | None) -> str:
    if case is None:
        return "not run"
    lost = case.get("steps_lost")  # a run that did not start again lost all, or nothing that can be counted
    text = f"{case['outcome']} ({lost})" if lost else case["outcome"]
    return f"{text}, file named" if case.get("named") else text


def most_lost(records: list[dict]) -> str:
    """Without those that nothing bounds: no checkpoint could be written at all."""
    bounded = [record for record in records if record["could_save"]]
    worst = max(bounded, key=lambda record: record["lost_steps"], default=None)
    return f"{worst['lost_steps']} ({worst['steps_while_saving']})" if worst else "-"


def equal(records: list[dict]) -> str:
    asked = [record["resumed_equal"] for record in records if record["resumed_equal"] is not None]
    return f"{sum(asked)} of {len(asked)}" if asked else "-"


def is_kill(record: dict) -> bool:
    return "SIGKILL" in record["fault"]


def count(records: list[dict], condition: Callable[[dict], bool]) -> int:
    return sum(1 for record in records if condition(record))


def table(header: Sequence[str], rows: Sequence[Row]) -> str:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def when(records: list[dict], key: str = "time") -> str:
    dates = sorted(record[key][:10] for record in records)
    return f"on {dates[0]}" if dates[0] == dates[-1] else f"from {dates[0]} to {dates[-1]}"


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    named = re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE)
    processor = named[1] if named else platform.machine()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return f"{os.cpu_count()} cores of {processor}, no GPU used, gloo; Python {platform.python_version()}, {versions}"


if __name__ == "__main__":
    main()
