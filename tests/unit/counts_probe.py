"""Three ranks, forked here, whose loaders count the steps ahead. Prints what each of them found.

python counts_probe.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from test_data import PAD, random_stream  # noqa: E402
from torch import distributed as dist  # noqa: E402

from benchmarks.scale.counting import fork  # noqa: E402
from samecurve.accelerator.mesh import Mesh  # noqa: E402
from samecurve.config.schema import Batch  # noqa: E402
from samecurve.data.batches import EvaluationBatches, StepBatches  # noqa: E402
from samecurve.data.datasets.base import DocumentRows  # noqa: E402
from samecurve.distributed.control_group import ControlGroup  # noqa: E402
from samecurve.distributed.network import free_port  # noqa: E402
from samecurve.losses.cross_entropy import count_trained  # noqa: E402
from samecurve.strategy.parallel_dims import ParallelDims  # noqa: E402

SIZE, STEPS, BROKEN_STEP, SLOW_SECONDS = 3, 6, 4, 0.3
ROWS = 8  # of each step; micro-batches of 2: ranks have 3, 3 and 2 rows, hence one of them one that trains nothing


class Rows(DocumentRows):
    """On rank 1 they come late, and from one step on not at all."""

    slow, breaks_at = 0.0, STEPS

    def drawn(self, indices, positions, seed):
        time.sleep(self.slow)
        if positions[0] >= self.breaks_at * ROWS:
            raise OSError("the disk is gone")
        return super().drawn(indices, positions, seed)


def counted(dims: ParallelDims, number: int, rows: Rows, num_workers: int = 0) -> dict:
    """What this rank counts in each step, with an evaluation between two steps; and how its loader ended."""
    mesh, world = Mesh(dims, number, torch.device("cpu")), ControlGroup()
    batch = Batch(global_batch_size=ROWS, micro_batch_size=2, sequence_length=6)
    options = {"num_workers": num_workers, "count": count_trained, "start_sum": world.start_sum}
    batches = StepBatches(rows, 3, batch, mesh.shard, STEPS, **options)
    held_out, evaluated, steps, error = EvaluationBatches(rows, 2, mesh.shard), None, [], ""
    try:
        for step, micro_batches in enumerate(batches, start=1):
            steps.append(mesh.count(micro_batches, count_trained))
            if step == 3:
                evaluated = mesh.count(held_out, count_trained)
                del mesh._hosts
    except (OSError, RuntimeError) as caught:
        error = type(caught).__name__
    asked = "_hosts" in vars(mesh)  # the group of counts for which a step would wait
    return {"steps": steps, "evaluated": evaluated, "error": error, "asked": asked}


def alone(rows: Rows) -> list:
    batch = Batch(global_batch_size=ROWS, micro_batch_size=2, sequence_length=6)
    mesh = Mesh(ParallelDims(), 0, torch.device("cpu"))
    steps = StepBatches(rows, 3, batch, (0, 1), STEPS)
    return [mesh.count(steps.at(step), count_trained) for step in range(STEPS)]


def rank(number: int, port: int, folder: Path) -> None:
    rows = Rows(random_stream(60, longest=12), 6, PAD)
    expected = alone(rows)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    apart, together = ParallelDims(dp_replicate=SIZE), ParallelDims(tp=SIZE)  # the latter read the same rows
    found: dict = {"expected": expected}
    rows.slow = SLOW_SECONDS if number == 1 else 0.0
    found["by thread"] = counted(apart, number, rows)
    rows.slow = 0.0
    found["by workers"] = counted(apart, number, rows, num_workers=1)
    found["same rows"] = counted(together, number, rows)
    rows.breaks_at = BROKEN_STEP if number == 1 else STEPS
    found["broken"] = counted(apart, number, rows)
    (folder / f"{number}.json").write_text(json.dumps(found))
    os._exit(0)


def main() -> None:
    folder, port = Path(sys.argv[1]), free_port()
    children = [fork(lambda number=number: rank(number, port, folder)) for number in range(SIZE)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * SIZE
    print(json.dumps([json.loads((folder / f"{number}.json").read_text()) for number in range(SIZE)]))


if __name__ == "__main__":
    main()
