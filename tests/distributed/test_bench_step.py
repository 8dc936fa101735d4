"""`samecurve bench step`: real runs of a recipe and of its variants, side by side."""

from __future__ import annotations

import json
import sys

import pytest
from harness import long

from samecurve.cli import commands


@pytest.mark.parametrize(("strategy", "processes"), long(("single", 1), ("zero2", 2)))
def test_a_table_of_what_each_option_does(strategy, processes, workspace):
    output = workspace.folder / f"bench_{strategy}"
    keys = "communication_data_type=bf16 " if strategy == "zero2" else ""  # of the strategy's JSON
    name = f"{keys}memory.activation_checkpointing=full seed=5"
    options = ["--options", "none", "--variant", name]
    options += ["--variant", "steps=none", "--steps", "3", "--warmup_steps", "1", "--rounds", "1"]
    options += ["--strategy", strategy, "--output", str(output), "--json", str(output / "found.json")]
    command = [sys.executable, "-m", "samecurve", "bench", "step", str(workspace.recipe), "batch.micro_batch_size=2"]
    run = workspace.execute([*command, *options], output)
    assert run.returncode == 0, run.output
    found = json.loads((output / "found.json").read_text())
    if keys:
        sent = json.loads((output / "01_0" / "run.json").read_text())
        assert (sent["reduce_dtype"], sent["strategy"]) == ("bfloat16", strategy)
    assert (found["strategy"], found["processes"]) == (strategy, processes)
    base, variant = found["variants"]
    assert base["variant"]["name"] == "as it is" and (base["ratio"], base["loss_difference"]) == (1, 0)
    assert variant["variant"]["name"] == name
    assert variant["ratio"] > 0 and variant["loss_difference"] > 1e-3  # another seed
    for each in found["variants"]:
        assert f"\n{each['variant']['name']} " in run.output
    recipes = [json.loads((output / name / "run.json").read_text())["recipe"] for name in ("00_0", "01_0")]
    assert [each["memory"]["activation_checkpointing"] for each in recipes] == ["none", "full"]
    assert "steps=none: failed: command line: steps: found" in run.output
    assert not list(output.glob("*/model")) and not list(output.glob("*/checkpoints"))


def test_a_recipe_that_does_not_run_is_told_before_any_process(workspace, capsys, monkeypatch):
    from harness import ROOT

    monkeypatch.chdir(ROOT)
    assert commands.main(["bench", "step", str(workspace.recipe), "steps=0"]) == 2
    assert "steps: found 0" in capsys.readouterr().err
    assert commands.main(["bench", "step", str(workspace.recipe), "--steps", "3"]) == 2
    assert "--warmup_steps less than --steps" in capsys.readouterr().err
    assert commands.main(["bench", "step", str(workspace.recipe), "--options", "model.attenton"]) == 2
    assert "--options: found model.attenton, but it must be a recipe key" in capsys.readouterr().err
