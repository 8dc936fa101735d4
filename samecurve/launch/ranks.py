"""The ranks of a run on one machine, without a launcher: `train.py --num_processes N`, and

    python -m samecurve.launch.ranks N -m MODULE ...     any module, once for each rank

Unlike torchrun's, their store listens on 127.0.0.1 alone where the ranks connect by network.rendezvous.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from samecurve.distributed import network
from samecurve.launch import together
from samecurve.strategy.launchers import OWN_PROCESSES


def start_and_exit(num_processes: int) -> NoReturn:
    """Run this process's own command line as `num_processes` ranks, and exit as the first of them that failed."""
    sys.exit(run(num_processes, sys.argv, {OWN_PROCESSES: str(num_processes)}))


def run(num_processes: int, words: Sequence[str], own: Mapping[str, str] = {}) -> int:
    """Run Python with these words as `num_processes` ranks. Returns the exit code, see together.wait.

    own: further variables of the environment.
    """
    ranks = environments(num_processes)
    return together.wait(together.start([sys.executable, *words], {**rank, **own}) for rank in ranks)


def environments(num_processes: int) -> list[dict[str, str]]:
    """Return the variables of each rank on this machine, as a launcher would set them."""
    size, port = str(num_processes), str(network.free_port())
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]
    return [{**os.environ, **world, **rank} for rank in ranks]


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
