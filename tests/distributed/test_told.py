"""What a run says of itself while it goes on: in each case the wiring, whose parts have tests of their own."""

from __future__ import annotations

from harness import launch_command
from test_levers import needs_compiler

from samecurve.workers import num_cores


@needs_compiler
def test_slow_rows_crowded_cores_and_recompilations(workspace):
    path, folder = workspace.strategy("ddp"), workspace.folder / "told"
    command = launch_command("fork", path, 2, workspace.folder, "tests/distributed/told_train.py")
    command += [str(workspace.recipe), "--strategy", str(path), f"output_dir={folder}", "compile=regional", "steps=6"]
    run = workspace.execute([*command, "checkpoint.every_steps=0"], folder, OMP_NUM_THREADS=str(num_cores()))
    assert run.returncode == 0, run.output
    assert run.output.count("went by waiting for rows: data.num_workers is 0; try 1") == 1
    assert run.output.count(f"compute with {2 * num_cores()} threads in all on {num_cores()} cores") == 1
    assert [record["recompilations"] >= 0 for record in run.metrics] == [True] * 6
    assert run.metrics[-1]["data_wait_fraction"] > 0.05
