"""A script's save_state under one strategy is its load_state under every other, mid-epoch and on other processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import largest_relative_difference, launch_command, long

PROBE = str(Path(__file__).with_name("states_probe.py"))
TYPES = {"single": "NO", "ddp": "MULTI_CPU", "fsdp": "FSDP"} | dict.fromkeys(("zero1", "zero2", "zero3"), "DEEPSPEED")
WORLDS = {"single": 0, "fsdp": 3, "zero3": 3}
SAVED, STEPS = 3, 8  # an epoch has 5


def losses(workspace, strategy: str, *arguments: str) -> list[float]:
    world = WORLDS.get(strategy, 2)
    command = launch_command("fork", Path(strategy) if world else None, world, workspace.folder, PROBE)
    run = workspace.execute([*command, strategy, *arguments], workspace.folder)
    assert run.returncode == 0, run.output
    (line,) = (line for line in run.output.splitlines() if line.startswith("LOSSES"))
    _, kind, values = line.split(" ", 2)
    assert kind == TYPES[strategy]
    return json.loads(values)


@pytest.fixture(scope="module")
def uninterrupted(workspace) -> list[float]:
    return losses(workspace, "single", str(STEPS), str(workspace.folder / "states" / "uninterrupted"))


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("fsdp", ["single", "ddp"]),
        *long(("single", [*TYPES]), *((name, [*TYPES]) for name in TYPES if name != "single")),
    ],
)
def test_a_script_goes_on_under_another_strategy(source, targets, workspace, uninterrupted, tmp_path):
    folder = str(tmp_path / source)
    first = losses(workspace, source, str(SAVED), folder)
    for target in targets:
        rest = losses(workspace, target, str(STEPS - SAVED), str(tmp_path / target / "again"), folder)
        assert largest_relative_difference(first + rest, uninterrupted) < 1e-5, (source, target)


def test_the_main_process_may_save_alone(workspace, uninterrupted, tmp_path):
    folder = str(tmp_path / "of_main")
    first = losses(workspace, "ddp", str(SAVED), folder)
    rest = losses(workspace, "ddp", str(STEPS - SAVED), str(tmp_path / "again"), folder)
    assert largest_relative_difference(first + rest, uninterrupted) < 1e-5


@pytest.mark.parametrize("strategy", ["zero3", long("fsdp")[0]])
def test_exports_are_whole_and_read_back_by_one_process(strategy, workspace, tmp_path):
    probe = str(Path(__file__).with_name("exports_probe.py"))
    command = launch_command("fork", Path(strategy), 2, workspace.folder, probe)
    run = workspace.execute([*command, strategy, str(tmp_path / "export")], workspace.folder)
    assert run.returncode == 0 and "APART 0.0" in run.output, run.output
    assert ("REFUSED backward: called twice" in run.output) == (strategy == "zero3"), run.output
