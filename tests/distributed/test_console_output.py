"""What a run says of itself while it goes on: in each case the wiring, whose parts have tests of their own."""

from __future__ import annotations

import platform

import pytest
from harness import launch_command, long
from test_step_options import needs_compiler

from samecurve.distributed.affinity import num_cores


@pytest.mark.full  # test_console.py and test_affinity.py have each warning every day
@needs_compiler
def test_slow_rows_crowded_cores_and_recompilations(workspace):
    path, folder = workspace.strategy("ddp"), workspace.folder / "told"
    command = launch_command("fork", path, 2, workspace.folder, "tests/distributed/console_output_train.py")
    command += [str(workspace.recipe), "--strategy", str(path), f"output_dir={folder}", "compile=regional", "steps=6"]
    run = workspace.execute([*command, "checkpoint.every_steps=0"], folder, OMP_NUM_THREADS=str(num_cores()))
    assert run.returncode == 0, run.output
    assert run.output.count("steps: data.num_workers is 0; try 1") == 1
    assert run.output.count(f"compute with {2 * num_cores()} threads in all on {num_cores()} cores") == 1
    assert [record["recompilations"] >= 0 for record in run.metrics] == [True] * 6
    assert run.metrics[-1]["data_wait_fraction"] > 0.05


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's limit is of x86 instructions")
@pytest.mark.parametrize("precision", ["bf16", *long("fp16")])
def test_a_precision_that_the_cpu_emulates(precision, workspace):
    """Before the first step, with the key; and mfu against what the CPU can do, not against the emulation."""
    directory = workspace.folder / f"slow_{precision}"
    command = [*launch_command("python", None, 1, workspace.folder), str(workspace.recipe), f"output_dir={directory}"]
    command += [
        f"precision={precision}",
        "steps=2",
        "schedule.warmup_steps=1",
        "batch.sequence_length=64",
        "evaluate.every_steps=0",
    ]
    run = workspace.execute([*command, "checkpoint.every_steps=0"], directory, ONEDNN_MAX_CPU_ISA="AVX2")
    assert run.returncode == 0, run.output
    header = run.output.partition("step 1/2")[0]
    assert header.count(f"warning     {precision} is slow on this CPU: fp32 multiplies matrices ") == 1
    assert header.count("or add precision=fp32 to the command\n") == 1
    assert run.facts["precision_warning"] in header
    assert [0 < record["mfu"] <= record["hfu"] < 1 for record in run.metrics] == [True] * 2
