"""The GPU benchmark at its toy size: the whole way from the script to the page, on a CPU."""

from __future__ import annotations

import json
import os
import sys

import pytest
from harness import ROOT, long

from benchmarks.gpu.cases import cases, chosen

# what samecurve refuses, here or with packed rows, and torch on a CPU; each is a row that says why
FLASH = "1b:attention=flash_attention_2"
REFUSED = {FLASH, f"{FLASH},micro_batch_size=1", "1b:attention=flex_attention", "8b-offload", "8b-offload-last"}
LIGER = "1b:kernels=liger"
REFUSED |= {LIGER, "1b:implementation=liger", f"{LIGER},implementation=liger", "1b:compile=regional,kernels=liger"}

PEERS = {"1b": "1b-trainer", "3b": "3b-trainer", "8b": "8b-trainer", "1b-documents": "1b-trainer-documents"}
CASE_SECONDS = 600  # one takes about 10; on a machine that does other things, two processes took 556
PARTS = {
    "models": ("ceilings", "shapes"),
    "peers": ("peer", "8b", "1b", "1b-documents"),
    "devices": ("devices",),
    "options": ("options",),
}


def distinct(names: tuple[str, ...]) -> list[str]:
    """Cases of these names and groups, but one of several that are the same run at the toy size, as 1b and 3b."""
    found = {json.dumps([case.definition, case.profiled]): case.name for case in chosen(CASES, names)}
    return list(found.values())


CASES = cases(2, toy=True)


@pytest.mark.parametrize("part", long(*PARTS))
def test_a_row_for_each_case_and_equal_rows_for_trainer(part, workspace):
    folder, names = workspace.folder / f"bench_gpu_{part}", distinct(PARTS[part])
    options = ["--toy", "--folder", str(folder), "--limit", str(CASE_SECONDS), "--only", *names]
    given = {"PYTHON": sys.executable, "SAMECURVE_CACHE": os.environ.get("SAMECURVE_CACHE", str(folder / "cache"))}
    command = ["bash", str(ROOT / "scripts" / "bench_gpu.sh"), *options]
    run = workspace.execute(command, folder, CASE_SECONDS * (len(names) + 1), **given)
    assert run.returncode == 0, run.output
    [machine] = json.loads((folder / "results.json").read_text()).values()
    rows = machine["rows"]
    assert rows.keys() == set(names)
    failed = {name: row["reason"] for name, row in rows.items() if row["state"] != "done"}
    assert failed.keys() <= REFUSED, failed
    pairs = [(ours, theirs) for ours, theirs in PEERS.items() if {ours, theirs} <= rows.keys()]
    assert pairs or part != "peers"
    for ours, theirs in pairs:  # bf16; the same weights on other rows are ten times further apart and more
        assert rows[theirs]["losses"][0] == pytest.approx(rows[ours]["losses"][0], abs=1e-4), theirs
    page = (folder / "gpu.md").read_text()
    assert all(f"| {name} |" in page for name in rows if ":" not in name and name != "ceilings")
    assert all(f"| {case.option} |" in page for case in CASES if case.name in rows and case.option)
    assert part != "models" or "Ceilings: " in page


def test_the_parts_have_all_cases():
    there = {json.dumps([case.definition, case.profiled]) for case in CASES}
    covered = {name for names in PARTS.values() for name in distinct(names)}
    assert {json.dumps([case.definition, case.profiled]) for case in CASES if case.name in covered} == there
    assert len(there) > 55
