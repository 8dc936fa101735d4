"""benchmarks/reliability.md, from the records of the fault battery."""

from __future__ import annotations

from benchmarks.faults.places import by_host, by_operation, by_pair, by_request
from benchmarks.faults.records import each, when
from benchmarks.faults.runs import by_kind, by_random, by_strategy, total
from benchmarks.faults.stock_loops import against_stock

COMMANDS = """```bash
export SAMECURVE_FAULT_RESULTS=benchmarks/faults/results.jsonl
bash scripts/test.sh --full tests/faults tests/distributed/test_all_pairs.py
python benchmarks/stock/faults.py
python scripts/reliability.py
```"""


def page(records: list[dict], stock: dict | None) -> str:
    apart = ("pair", "unit", "host", "store")
    commits, machines = each(records, "commit"), each(records, "machine")
    pairs, units, hosts, stores = ([r for r in records if r["kind"] == kind] for kind in apart)
    records = [r for r in records if r["kind"] not in apart]
    runs = [record for record in records if record["kind"] != "corruption"]
    parts = [
        "# How runs survive faults",
        total(records),
        f"Measured {when(records)} on CPUs over gloo, at commit {commits}: {machines}. "
        "Made by `scripts/reliability.py`; to run it again:",
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
