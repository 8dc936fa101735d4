"""`plan --ranks`: every rank's place, groups, rows and micro-batches, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from samecurve.cli.commands import main
from samecurve.planner import inputs, placement
from samecurve.strategy.parallel_dims import ParallelDims

MODEL = "benchmarks/planner/llama_8b.json"
GPUS = 16_384
CODE = """
import sys, time
from samecurve.cli.commands import main
began = time.perf_counter()
assert main(sys.argv[1:]) == 0
assert "torch" not in sys.modules
print(time.perf_counter() - began)
"""


def test_16384_ranks_in_ten_seconds_without_torch():
    """By hand: rank 12345 is tensor part 1 of data-parallel rank 6172, which reads from row 6172 x 2 + 3616 on."""
    arguments = ["plan", MODEL, "--cluster", "h100x8", "--gpus", str(GPUS), "batch.global_batch_size=20000"]
    arguments += ["--strategy", "configs/fsdp_tp.yaml", "--ranks", "--rank", "12345"]
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    shown = done.stdout.splitlines()
    assert float(shown[-1]) < 10
    assert "16,384 ranks: dp_shard 8192 x tp 2; 20000 rows per step" in shown
    assert any(line.startswith("rank 12345: dp_shard 6172, tp 1; rows 15960 to 15961 of each step") for line in shown)
    assert "note: 20000 rows on 8192 ranks: 3616 of them read 3, the others 2" in shown


@pytest.fixture(scope="module")
def wanted():
    return inputs.read("recipes/quickstart.yaml", ["batch.global_batch_size=12", "batch.micro_batch_size=2"])


@pytest.mark.parametrize(
    "dims", [ParallelDims(dp_shard=8), ParallelDims(2, 1, 4), ParallelDims(1, 2, 2, 1, 2), ParallelDims(dp_replicate=5)]
)
def test_every_rank_reads_what_the_loader_gives_it(wanted, dims):
    """StepBatches' rule: the readers' shares in order; ranks that differ in pp, cp or tp alone read the same."""
    readers, seen = dims.dp_replicate * dims.dp_shard, set()
    for rank in range(dims.world_size):
        rows, micro_batches = placement.rows_of(wanted.batch, dims, rank)
        reader = rank // (dims.cp * dims.tp) % readers
        before = sum(12 // readers + (other < 12 % readers) for other in range(reader))
        assert rows == range(before, before + 12 // readers + (reader < 12 % readers))
        assert sum(micro_batches) == len(rows)
        seen |= set(rows)
    assert seen == set(range(12))


def test_a_rank_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(Path(MODEL).read_text())))
    assert main(["plan", str(path), "--cluster", "h100x8", "--ranks", "--rank", "8"]) == 2
    assert "has ranks 0 to 7" in capsys.readouterr().err
