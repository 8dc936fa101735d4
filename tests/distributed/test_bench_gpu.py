"""The GPU benchmark at its toy size: the whole way from the script to the page, on a CPU."""

from __future__ import annotations

import json
import os
import sys

import pytest
from harness import ROOT, long

# what samecurve refuses, here or with packed rows, and torch on a CPU; each is a row that says why
FLASH = "1b:attention=flash_attention_2"
REFUSED = {FLASH, f"{FLASH},micro_batch_size=1", "1b:attention=flex_attention", "8b-offload"}
LIGER = "1b:kernels=liger"
REFUSED |= {LIGER, "1b:implementation=liger", f"{LIGER},implementation=liger", "1b:compile=regional,kernels=liger"}

PEERS = {"1b": "1b-trainer", "3b": "3b-trainer", "8b": "8b-trainer", "1b-documents": "1b-trainer-documents"}


@pytest.mark.parametrize("only", long((("1b", "1b-trainer"),), ((),)), ids=["two", "all"])
def test_a_row_for_each_case_and_equal_rows_for_trainer(only, workspace):
    folder = workspace.folder / f"bench_gpu_{len(only)}"
    options = ["--toy", "--folder", str(folder), "--limit", "600", *(["--only", *only] if only else [])]
    given = {"PYTHON": sys.executable, "SAMECURVE_CACHE": os.environ.get("SAMECURVE_CACHE", str(folder / "cache"))}
    run = workspace.execute(["bash", str(ROOT / "scripts" / "bench_gpu.sh"), *options], folder, **given)
    assert run.returncode == 0, run.output
    [machine] = json.loads((folder / "results.json").read_text()).values()
    rows = machine["rows"]
    failed = {name: row["reason"] for name, row in rows.items() if row["state"] != "done"}
    assert failed.keys() <= REFUSED, failed
    for ours, theirs in PEERS.items():
        if theirs in rows:  # bf16; the same weights on other rows are ten times further apart and more
            assert rows[theirs]["losses"][0] == pytest.approx(rows[ours]["losses"][0], abs=1e-4), theirs
    page = (folder / "gpu.md").read_text()
    assert all(f"| {name} |" in page for name in rows if ":" not in name and name != "ceilings")
    if only:
        assert rows.keys() == set(only)
        return
    assert len(rows) > 40 and "Ceilings: " in page and "Not run yet" not in page
    assert all(f"| {option} |" in page for option in ("as it is", "compile=regional", "optimizer.name=muon"))
