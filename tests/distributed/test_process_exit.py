"""A process that has done its work ends: no destructor waits for threads that wait for the interpreter."""

from __future__ import annotations

import re
from pathlib import Path

from harness import launch_command


def test_no_destructor_joins_the_threads_of_gloo(workspace):
    """DDP's Reducer does when it is the last to hold its group, with the interpreter's lock in hand (torch 2.13)."""
    path = workspace.strategy("ddp")
    script = str(Path(__file__).with_name("process_exit_probe.py"))
    command = launch_command("fork", path, 2, workspace.folder, script)
    run = workspace.execute([*command, str(workspace.recipe), "--strategy", str(path)], workspace.folder)
    assert run.returncode == 0, run.output
    assert "ENGINE DistributedDataParallel" in run.output, run.output
    left = [int(number) for number in re.findall(r"LEFT (\d+)", run.output)]
    assert len(left) == 2 and all(left), run.output
