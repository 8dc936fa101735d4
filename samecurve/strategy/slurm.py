"""The variables of SLURM's tasks, in the names that torch's launchers use."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping


def variables(environ: Mapping[str, str], first_host: Callable[[str], str] | None = None) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and the like for a task of srun; {} under another launcher, or for a single task.

    A batch script is task 0 of no step: only the step's own variables tell what srun started.

    Args:
        first_host: replaces `scontrol show hostnames` in tests.
    """
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in environ or tasks < 2:
        return {}
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_here(environ, tasks)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or (first_host or _first_host)(environ["SLURM_STEP_NODELIST"]),
        # the same for all tasks of a job, and another one for a job that shares the node
        "MASTER_PORT": environ.get("MASTER_PORT") or str(20000 + int(environ["SLURM_JOB_ID"]) % 20000),
    }


def _tasks_here(environ: Mapping[str, str], tasks: int) -> int:
    """Return the number of the step's tasks on this node. SLURM writes those of all nodes as 4(x2),3."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
    node = int(environ.get("SLURM_NODEID", "0"))
    if node < len(counts):
        return counts[node]
    return max(1, tasks // int(environ.get("SLURM_STEP_NUM_NODES", "1")))


def _first_host(nodes: str) -> str:
    command = ["scontrol", "show", "hostnames", nodes]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
