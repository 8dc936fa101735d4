"""docs/architecture.md names the files that a training step under ZeRO-3 really runs, in their order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from harness import ROOT, launch_command

PAGE = ROOT / "docs" / "architecture.md"
PLACES = {"step": "## One step under ZeRO-3", "rows": "### How a row is read", "after": "### After the step"}
SHORT = ("steps=4", "schedule.warmup_steps=0", "evaluate.every_steps=0", "data.validation_fraction=0")
SHORT += ("checkpoint.every_steps=0", "export.enabled=false", "batch.micro_batch_size=2")


def named(place: str) -> list[str]:
    """The files of the table below a heading of the page."""
    text = PAGE.read_text().split(f"{PLACES[place]}\n")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([\w./]+)`", row)]
    return [name if name == "train.py" else f"samecurve/{name}" for name in names]


@pytest.fixture(scope="module")
def walk(workspace) -> dict[str, dict[str, int]]:
    path, output_dir = workspace.strategy("zero3"), workspace.folder / "walk"
    command = launch_command("fork", path, 2, workspace.folder, str(Path(__file__).with_name("step_walk_probe.py")))
    arguments = [str(workspace.recipe), f"output_dir={output_dir}", *SHORT, "--strategy", str(path)]
    run = workspace.execute([*command, *arguments], output_dir)
    assert run.returncode == 0, run.output
    assert run.facts["engine"] == "DeepSpeedEngine" and run.facts["zero_stage"] == 3
    return json.loads(run.output.split("WALK ")[1].splitlines()[0])


def test_the_page_names_the_files_of_a_step(walk):
    assert named("step") == [*walk["step"]]
    (lines,) = re.findall(r"the functions that run have (\d+)", PAGE.read_text())
    assert sum(walk["step"].values()) == pytest.approx(int(lines), rel=0.1)


def test_the_page_names_the_files_before_and_after_a_step(walk):
    for place in ("rows", "after"):
        assert sorted(named(place)) == sorted(walk[place])
