"""scripts/fit_planner.py on a small table: it fits, and writes constants, page and picture."""

from __future__ import annotations

import csv
import json
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from samecurve.planner import answers, hardware

SCRIPT = Path("scripts/fit_planner.py").resolve()
ROW = dict.fromkeys((*answers.NEEDED, *answers.UNUSED), "") | {
    **{"model": "tiny", "layers": "4", "hidden": "512", "heads": "8", "ffn": "2048", "mlp": "gelu", "vocab": "1000"},
    **{"gpu": "H100-80GB", "gpu_memory_gib": "79.1", "gpus": "8", "dp": "8", "zero": "1", "seq": "1024"},
    **{"micro_batch": "1", "grad_accum": "4", "global_batch": "32", "precision": "bf16", "status": "ran"},
    **{"time_ok": "1", "memory_ok": "1", "quality": "a"},
}


def run(source: str, stack: str, micro_batch: int, seconds: str, gib: str, **cells: str) -> dict[str, str]:
    batch = {"micro_batch": str(micro_batch), "grad_accum": str(4 // micro_batch)}
    name = f"{source}-{micro_batch}"
    return {**ROW, "id": name, "source": source, "stack": stack, "step_s": seconds, "memory_gib": gib, **batch, **cells}


OOM = {"status": "oom", "oom_evidence": "states", "time_ok": "0", "memory_ok": "0", "layers": "400", "hidden": "8192"}
RUNS = [
    *(run("one", "nanotron", size, f"{0.2 - 0.02 * size}", f"{1 + 0.5 * size}") for size in (1, 2, 4)),
    *(run("two", "megatron", size, f"{0.3 - 0.02 * size}", f"{1 + 0.6 * size}") for size in (1, 2, 4)),
    run("two", "megatron", 1, "", "", **OOM) | {"id": "oom"},
]


@pytest.fixture
def no_profiles(tmp_path, monkeypatch):
    """Profiles of the test's own; other tests read the shipped ones again."""
    monkeypatch.setattr(hardware, "PATH", tmp_path / "profiles.json")
    for cached in (hardware.shipped, hardware.profile):
        cached.cache_clear()
    yield
    for cached in (hardware.shipped, hardware.profile):
        cached.cache_clear()


@pytest.mark.usefixtures("no_profiles")
def test_page_picture_and_profiles_are_written(tmp_path, monkeypatch, capsys):
    table = tmp_path / "made_up.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows(RUNS)
    script = runpy.run_path(str(SCRIPT))
    places = {"ROOT": tmp_path, "PAGE": tmp_path / "planner.md", "PICTURE": tmp_path / "planner.svg"}
    # the script's functions look their names up where they were defined
    script["main"].__globals__.update(places)
    monkeypatch.setattr(sys, "argv", ["fit_planner.py", str(table), "--page", "--write"])
    script["main"]()
    found = json.loads((tmp_path / "profiles.json").read_text())
    assert set(found["stacks"]) == {"default", "nanotron", "megatron"}
    assert found["origin"] == "scripts/fit_planner.py on made_up.csv, 6 runs"
    assert set(found["stacks"]["default"]) == {field.name for field in fields(hardware.Profile)}
    page = (tmp_path / "planner.md").read_text()
    assert "| out of memory, states | 1 | 0 | 0.0 % |" in page and "Of 2 cells" in page
    assert "| step time, worst source (" in page and "| 1 - rank correlation of speeds" in page
    rows = [line.split(" | ")[0].strip("| ") for line in page.partition("## By source")[2].splitlines()]
    assert {"one", "two", "all runs"} < {*rows}
    ElementTree.parse(tmp_path / "planner.svg")
    printed = capsys.readouterr().out
    assert "step time, source left out" in printed and "wrote planner.md and planner.svg" in printed
