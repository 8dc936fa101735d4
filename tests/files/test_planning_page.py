"""docs/planning.md shows what `plan` prints."""

from __future__ import annotations

import re
import shlex

import pytest
from pages import ROOT, text

from samecurve.cli.commands import main

STORY = re.compile(r"^```bash\n(python -m samecurve plan benchmarks/[^\n]*)\n```\n\n```\n(.*?)\n```$", re.M | re.S)


def stories() -> list[tuple[str, str]]:
    return STORY.findall(text("docs/planning.md"))


def test_all_stories_are_told():
    gpus = [re.findall(r"--gpus \d+", command) for command, _ in stories()]
    assert gpus == [["--gpus 8"], ["--gpus 64"], ["--gpus 32"]]


@pytest.mark.parametrize("command, shown", stories(), ids=lambda words: words[:60])
def test_the_page_shows_what_the_command_prints(command, shown, capsys, monkeypatch):
    """When the planner's constants change, the page shows the new output."""
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[3:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
    assert printed == [line.rstrip() for line in shown.splitlines()]


def test_the_readme_has_the_errors_of_the_benchmark():
    every = re.search(r"^\| all runs \|(.*)\|$", (ROOT / "benchmarks" / "planner.md").read_text(), re.M)
    assert every
    timed, time_error, _, _, held, memory_error, *_ = (cell.strip() for cell in every[1].split("|"))
    claim = f"{timed} published step times are predicted within {time_error} %, and half of {held} memory peaks within"
    assert f"Half of {claim} {memory_error} %" in text("README.md")
