"""scripts/reliability.py: its numbers are those of the results, worked out by hand here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import battery
from battery import Record, write_result
from harness import RESULTS, ROOT, append_result

RECORDS = [
    Record("ddp", 2, "torchrun", "kill", "SIGKILL step", 1, 7, 3, resumed_equal=True),
    Record("ddp", 2, "torchrun", "hang", "SIGSTOP", 124, 4, hung=True, resumed_equal=False),
    Record("ddp", 2, "torchrun", "disk", "ENOSPC always", 7, 19, could_save=False, resumed_equal=True),
    Record("zero1", 2, "torchrun", "kill", "SIGKILL save.write", 1, 5, checkpoint_lost=True, left_behind=2),
    Record("ddp", 2, "torchrun", "random", "SIGKILL of rank 1", 1, 12, 4, resumed_equal=True),
    Record("ddp", 2, "torchrun", "random", "SIGKILL of launcher", 1, 3, resumed_equal=True),
    Record("-", 2, "-", "corruption", "state.json empty"),
    Record("-", 2, "-", "corruption", "state.json half", corruption_accepted=True),
]
PAIRS = [
    {"strategy": "ddp", "world": 2, "sources": 3, "unequal": 0, "loss": 2e-7, "norm": 1e-7},
    {"strategy": "fsdp", "world": 3, "sources": 3, "unequal": 1, "loss": 3e-7, "norm": 0.0},
]
UNITS = [
    {"fault": "kill one", "cases": 90, "violations": 0},
    {"fault": "EIO", "cases": 38, "violations": 1},
    {"fault": "kill one", "cases": 92, "violations": 0},
]
HOSTS = [
    {"fault": "killed", "lost_steps": 3, "seconds_alone": 40.0, "seconds_together": 20.0, "lost_steps_at_return": 0},
    {"fault": "killed", "lost_steps": 8, "seconds_alone": 61.0, "seconds_together": 30.0, "lost_steps_at_return": 2},
    {"fault": "cable cut", "lost_steps": 5, "seconds_alone": 99.0, "seconds_together": 9.0, "lost_steps_at_return": 0},
]
STORE = {"kind": "store", "requests": 70, "commits": 3, "given_up": 1, "lost": 0, "accepted": 0, "unfinished": 0}
STORES = [{**STORE, "faults": {"lost": 4, "killed": 1}}, {**STORE, "faults": {"lost": 2}, "lost": 1, "accepted": 2}]
CASE = {"steps_lost": 0, "outcome": "same curve", "date": "2026-01-02", "named": False}
STOCK = {
    "settings": {"processes": 2, "steps": 30, "save_every": 5, "keep": 2},
    "cases": [
        {**CASE, "loop": "a", "fault": "SIGSTOP"},
        {**CASE, "loop": "b", "fault": "SIGSTOP", "outcome": "hung"},
        {**CASE, "loop": "a", "fault": "bit flip", "steps_lost": 4, "named": True},
        {**CASE, "loop": "b", "fault": "bit flip", "outcome": "silently damaged"},
    ],
}


def written(tmp_path: Path, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "reliability.py"), str(tmp_path / "faults.jsonl")]
    output = tmp_path / "page.md"
    subprocess.run([*command, "--output", str(output), *arguments], check=True)
    return output.read_text()


def cells(page: str, first: str) -> list[list[str]]:
    rows = re.findall(rf"^\| {re.escape(first)} \|.*$", page, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]


def test_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv(RESULTS, str(tmp_path / "faults.jsonl"))
    for record in RECORDS:
        write_result(record)
    for pair in PAIRS:
        append_result({"kind": "pair", **pair})
    for unit in UNITS:
        append_result({"kind": "unit", **unit})
    for host in HOSTS:
        append_result({"kind": "host", "strategy": "ddp", "resumed_equal": True, **host})
    for store in STORES:
        append_result(store)
    (tmp_path / "stock.json").write_text(json.dumps(STOCK))
    page = written(tmp_path, "--stock", str(tmp_path / "stock.json"))
    expected = {
        "kills injected": 4,
        "other faults injected": 2,
        "files damaged": 2,
        "corruptions accepted": 1,
        "hangs": 1,
        "processes left behind": 2,
        "runs that did not end as the undisturbed one": 1,
    }
    assert {name: cells(page, name) for name in expected} == {name: [[str(n)]] for name, n in expected.items()}
    assert cells(page, "committed checkpoints lost") == [["1"], ["1"]]  # of runs, and in the store
    stored = {"sessions": 2, "checkpoints committed in the store": 6, "damaged or partial checkpoints accepted": 2}
    stored |= {"no answer after the server had acted": 6, "SIGKILL of the process before the server acted": 1}
    assert {name: cells(page, name) for name in stored} == {name: [[str(n)]] for name, n in stored.items()}
    assert "7 of 140 here" in page
    assert cells(page, "killed") == [["2", "8", "5.5", "50 (61)", "25 (30)"]]
    assert cells(page, "cable cut") == [["1", "5", "5.0", "99 (99)", "9 (9)"]]
    assert "At a return at most 2 steps were lost" in page and "ended as an undisturbed one" in page
    by_strategy, by_random, by_pair = cells(page, "ddp")
    assert by_strategy == ["1", "2", "0", "1", "0", "7 (3)", "2 of 3"]
    assert by_random == ["2", "1", "0", "1", "12 (4)", "7.5", "2 of 2"]
    assert by_pair == ["2", "3", "0", "2.0e-07", "1.0e-07"] and cells(page, "fsdp") == [
        ["3", "3", "1", "3.0e-07", "0.0e+00"]
    ]
    assert "6 pairs" in page
    assert [cells(page, name) for name in ("kill one", "EIO")] == [[["182", "0"]], [["38", "1"]]]
    assert cells(page, "all") == [["220", "1"]]
    assert cells(page, "zero1") == [["1", "0", "1", "0", "2", "5 (0)", "-"]]
    assert cells(page, "SIGSTOP") == [["same curve", "hung"]]
    assert cells(page, "bit flip") == [["same curve (4), file named", "silently damaged"]]
    assert cells(page, "same curve") == [["2", "0"]] and cells(page, "most steps lost") == [["4", "0"]]


def test_without_stock_loops_there_is_no_table_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv(RESULTS, str(tmp_path / "faults.jsonl"))
    write_result(RECORDS[0])
    assert "stock loops" not in written(tmp_path, "--stock", str(tmp_path / "absent.json"))


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch):
    monkeypatch.delenv(RESULTS, raising=False)
    monkeypatch.chdir(tmp_path)
    battery.write_result(RECORDS[0])
    assert not list(tmp_path.iterdir()) and asdict(RECORDS[0])["strategy"] == "ddp"
