"""`bisect` names planted faults, and finds none where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planted_faults import FAULTS, SCRIPT
from test_proved_script import TORCH, TRAINER

from samecurve.cli.commands import main

EVERY_DAY = ("gradient_of_weight",)
CLEAN = {
    "ddp": (SCRIPT, "ddp"),
    "fsdp": (SCRIPT, "fsdp"),
    "zero1": (SCRIPT, "zero1"),
    "zero2": (SCRIPT, "zero2"),
    "zero3": (SCRIPT, "zero3"),
    "trainer": (TRAINER, "ddp"),
    "torch": (TORCH, "ddp"),
    "renamed": (SCRIPT.replace("number, batch", "index, batch"), None),
}


def bisect(folder: Path, script: str, strategy: str | None) -> tuple[int, dict]:
    (folder / "train.py").write_text(script)
    (folder / "before.py").write_text(SCRIPT)
    pair = ["--strategy", strategy] if strategy else ["--against", str(folder / "before.py")]
    code = main(["bisect", str(folder / "train.py"), *pair, "--steps", "3", "--output", str(folder / "pair")])
    return code, json.loads((folder / "pair" / "bisect.json").read_text())


@pytest.mark.parametrize(
    "name", [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.full) for name in FAULTS]
)
def test_planted_fault_is_named(name, tmp_path, capsys):
    fault = FAULTS[name]
    code, place = bisect(tmp_path, fault.script, fault.strategy)
    assert code == 1 and place["parts"]
    assert (place["quantity"], place["rank"], place["step"]) == (fault.quantity, fault.rank, fault.step), place
    assert fault.place in place["place"], place
    assert f" in step {fault.step}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.full
@pytest.mark.parametrize("name", CLEAN)
def test_trainings_that_are_the_same_do_not_part(name, tmp_path):
    assert bisect(tmp_path, *CLEAN[name]) == (0, {"parts": False, "text": ""})


def test_there_are_faults_of_each_strategy():
    assert len(FAULTS) == 20
    assert {fault.strategy for fault in FAULTS.values()} == {"ddp", "fsdp", "zero2", "zero3", None}
