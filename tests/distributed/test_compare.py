"""The command that compares strategies: those that agree, and one that a machine without a GPU cannot run."""

from __future__ import annotations

import sys

import pytest
from harness import assert_moves, largest_relative_difference


def test_a_table_of_what_agrees_and_what_cannot_run(workspace):
    output = workspace.folder / "compared"
    asked = ["--strategies", "single,zero2,fsdp_offload", "--steps", "4", "--output", str(output)]
    command = [sys.executable, "-m", "samecurve", "compare", str(workspace.recipe), "batch.micro_batch_size=2", *asked]
    run = workspace.execute(command, output, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in run.output.splitlines() if line[:1] == "|"]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows[2:]] == [
        ("single", "LlamaForCausalLM", "1", "PASS"),
        ("zero2", "DeepSpeedEngine", "2", "PASS"),
    ]
    assert rows[2][4] == "reference" and 0 <= float(rows[3][4]) <= 1e-5
    assert "- fsdp_offload: cannot run here: FSDP offloads through pinned memory, which needs an accele" in run.output
    # it was asked for by name and did not run
    assert run.returncode == 1, run.output
    assert (output / "table.md").read_text() in run.output
    assert (output / "chart.svg").read_text().startswith("<svg")


@pytest.mark.full  # the verdict on such curves is tested every day in tests/unit/test_cli.py
def test_a_dead_model_is_not_the_same_curve(workspace):
    """Weights that round to 0: every strategy gives the same flat loss, and gradient norms below 1e-20."""
    output = workspace.folder / "dead"
    asked = ["--strategies", "single,ddp", "--steps", "3", "--output", str(output)]
    command = [sys.executable, "-m", "samecurve", "compare", str(workspace.recipe), *asked]
    run = workspace.execute([*command, "batch.micro_batch_size=2", "model.config.initializer_range=1e-40"], output)
    assert run.returncode == 1 and "FAIL: single has gradient norms of at most " in run.output, run.output
    assert "PASS |" not in run.output


@pytest.mark.parametrize("dead", [[7.6246] * 4, [0.0, 0.0], [1e-20, 1e-37], [5.0, 5.00001, 5.0]])
def test_what_stands_still_is_no_reference(dead):
    with pytest.raises(AssertionError, match="is 0|stands still"):
        largest_relative_difference(dead, dead)
    assert_moves([5.0, 4.9, None])
