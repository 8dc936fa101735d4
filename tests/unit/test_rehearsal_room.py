"""What a rehearsal makes of its measurements, with numbers by hand."""

from __future__ import annotations

import math
import mmap
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_recipes import make_recipe

from samecurve.checkpoint.commit import PARTIAL
from samecurve.config.schema import Recipe
from samecurve.distributed.control_group import ControlGroup
from samecurve.errors import ConfigurationError, HangError, StorageError
from samecurve.run.run_directory import RunDirectory
from samecurve.specs.gpus import GIB
from samecurve.storage.filesystem import UNKNOWN_BYTES
from samecurve.strategy.parallel_dims import ParallelDims
from samecurve.strategy.plan import Plan, Strategy
from samecurve.training import rehearsal, rehearsal_process, room, startup
from samecurve.training.rehearsal import DoesNotFit, RehearsedStage

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: Failed to CUDA calloc 4194304 bytes, Cuda failure 2 'out of memory'"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
    ],
)
def test_memory_that_is_full_is_told_from_other_errors(error, is_memory):
    assert rehearsal_process.is_out_of_memory(error) is is_memory


def recipe(folder="runs/x/.rehearsal", steps=100, **more) -> Recipe:
    more["batch"] = {"global_batch_size": 8, "micro_batch_size": 4, "sequence_length": 32, **more.get("batch", {})}
    return make_recipe(Path(folder), "x", "pretrain", **{"output_dir": str(folder), "steps": steps, **more})


def stages(free_gib: float) -> list[RehearsedStage]:
    """A checkpoint of 3 GiB and an export of 1 GiB."""
    sizes = {"start": 0, "checkpoint": 3, "export": 1}
    return [RehearsedStage(name, 1.0, GIB, 0, GIB, size * GIB, int(free_gib * GIB)) for name, size in sizes.items()]


@pytest.mark.parametrize(
    ("changes", "num_kept", "needed_gib"),
    [
        ({}, 0, 10),  # keep 2, and one that is being written
        ({"checkpoint": {"keep": 4}}, 0, 16),
        ({"checkpoint": {"every_steps": 0}}, 0, 4),  # only when a signal stops the run
        ({"checkpoint": {"keep": 2, "best": "eval_loss"}}, 0, 13),
        ({}, 2, 4),  # two are there already
        ({"steps": 1}, 0, 4),
    ],
)
def test_the_disk_has_to_hold_all_checkpoints_that_are_kept(changes, num_kept, needed_gib):
    checkpoints = Path("runs/x/checkpoints")
    rehearsal_process.check_room(recipe(**changes), checkpoints, stages(needed_gib), num_kept)
    with pytest.raises(
        StorageError, match=r"runs/x/checkpoints: .* GiB are free, .*checkpoint.keep: .*free 0.5 GiB"
    ) as caught:
        rehearsal_process.check_room(recipe(**changes), checkpoints, stages(needed_gib - 0.5), num_kept)
    assert "up to" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "num_kept", "free_gib", "refused"),
    [
        ({}, 0, 3.9, True),  # not even one checkpoint of 3 GiB and the export of 1 GiB
        ({}, 0, 4.1, False),
        ({}, 2, 2.9, True),
        ({}, 2, 3.1, False),  # an old checkpoint goes before the export comes
        ({"checkpoint": {"every_steps": 0}}, 0, 1.1, False),
        ({}, 0, UNKNOWN_BYTES / GIB, False),
    ],
)
def test_a_run_without_room_for_its_model_does_not_start(changes, num_kept, free_gib, refused):
    needs = room.needs(recipe("runs/x", **changes), Path("runs/x/checkpoints"), 3 * GIB, GIB, num_kept)
    says = "runs/x/checkpoints: .* (GiB are free, but up to|does not say how much space)"
    free = min(int(free_gib * GIB), UNKNOWN_BYTES)
    if refused:
        with pytest.raises(StorageError, match=says):
            room.check_room(needs, num_kept, lambda _: free)
    else:
        assert re.match(says, room.check_room(needs, num_kept, lambda _: free))
    assert not room.check_room(needs, num_kept, lambda _: 100 * GIB)


@pytest.mark.parametrize(
    ("free_gib", "says"),
    [
        ({"run": 1.1, "other": 9.1}, ""),  # an export of 1 GiB; three checkpoints of 3 GiB
        ({"run": 0.9, "other": 99}, "run: 0.9 GiB are free, but an export"),
        ({"run": 99, "other": 2.9}, "run/checkpoints: 2.9 GiB are free, but up to 3 checkpoints"),
        ({"run": 99, "other": 8.9}, "run/checkpoints: 8.9 GiB are free"),
    ],
)
def test_each_disk_is_measured_for_what_it_gets(free_gib, says, tmp_path, monkeypatch):
    """checkpoints/ is a link to another disk."""
    run, other = tmp_path / "run", Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    run.mkdir()
    (run / "checkpoints").symlink_to(other)
    monkeypatch.setattr(room, "SPARE_BYTES", 0)
    needs = room.needs(recipe(run), run / "checkpoints", 3 * GIB, GIB, 0)

    def free(folder: Path) -> int:
        return int(free_gib["run" if folder == run else "other"] * GIB)

    if says and "8.9" not in says:
        with pytest.raises(StorageError, match=says):
            room.check_room(needs, 0, free)
    else:
        assert (says in room.check_room(needs, 0, free)) if says else not room.check_room(needs, 0, free)
    # a rehearsal knows the space that its disk had before it wrote
    if says:
        stage = [stage._replace(disk_bytes=free(run)) for stage in stages(0)]
        monkeypatch.setattr(rehearsal_process.LocalFileSystem, "free_bytes", lambda _, folder: free(folder))
        with pytest.raises(StorageError, match=says):
            rehearsal_process.check_room(recipe(run / ".rehearsal"), run / "checkpoints", stage, 0)


def test_a_stream_needs_room_in_the_cache(tmp_path):
    data = {"path": "x", "streaming": True, "cache_dir": str(tmp_path), "shuffle_buffer_mib": 1024}
    needs = room.needs(recipe(tmp_path, data=data), tmp_path / "checkpoints", 3 * GIB, GIB, 0)
    assert [need.most // GIB for need in needs] == [9, 1, 2]
    assert "2 blocks of 1 GiB of the stream" in room.check_room(needs, 0, lambda _: 11 * GIB)


def test_what_a_killed_save_left_is_removed_before_room_is_measured(tmp_path, monkeypatch):
    """A disk may be full of it."""
    run = RunDirectory(tmp_path)
    (debris := run.checkpoints / f"{PARTIAL}step_00000008").mkdir(parents=True)
    seen = []
    monkeypatch.setattr(startup.LocalFileSystem, "free_bytes", lambda *_: seen.append(debris.exists()) or 100 * GIB)
    context: Any = SimpleNamespace(
        recipe=recipe(tmp_path, export={"enabled": False}),
        run=run,
        world=ControlGroup(),
        progress=SimpleNamespace(log=print),
    )
    saves: Any = SimpleNamespace(num_bytes=lambda engine: GIB)
    skeleton: Any = torch.nn.Linear(2, 2)
    skeleton.num_parameters = lambda: 6
    startup._check_room(context, startup.Built(cast(Any, None), skeleton, {}), cast(Any, None), saves)
    assert seen == [False]
    run.close()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_exhausted_memory_names_stage_and_key(error, tmp_path):
    stage = rehearsal_process.StageMeter(recipe(tmp_path / "x"), CPU, ControlGroup())
    advice = r"next step: .*\n.*lower batch.micro_batch_size \(found 4\)"
    with pytest.raises(DoesNotFit, match=advice), stage("next step"):
        raise error


def test_another_error_stays_what_it_is(tmp_path):
    stage = rehearsal_process.StageMeter(recipe(tmp_path / "x"), CPU, ControlGroup())
    with pytest.raises(RuntimeError, match="a bug"), stage("evaluation"):
        raise RuntimeError("a bug")


def test_the_peak_is_that_of_the_stage(tmp_path):
    stage = rehearsal_process.StageMeter(recipe(tmp_path / "x"), CPU, ControlGroup())
    with stage("first step"):
        # 200 MB that go back to the system, whatever an allocator of this process keeps
        with mmap.mmap(-1, 200_000_000) as memory:
            for _ in range(200):
                memory.write(b"1" * 1_000_000)
    with stage("next step"):
        torch.ones(1_000_000)
    first, second = (each.peak_bytes for each in stage.done)
    assert 150e6 < first - second < 250e6


ONE = Strategy()


def searched(monkeypatch, num_rows: int, most: int, strategy=ONE) -> tuple[int, list[int]]:
    """The size found for a rank with `num_rows` rows, of which `most` fit at once, and the sizes tried."""
    tried = []

    def run(plan, ranks):
        tried.append(plan.recipe.batch.micro_batch_size)
        if tried[-1] > most:
            raise DoesNotFit("first step: too large")
        return []

    monkeypatch.setattr(rehearsal, "run_stages", run)
    batch = {"global_batch_size": num_rows, "micro_batch_size": "auto", "sequence_length": 32}
    plan = Plan(recipe(batch=batch), strategy, "x.yaml", ())
    return rehearsal.rehearse(plan, [{"RANK": "1"}]).recipe.batch.micro_batch_size, tried


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 16, 37])
def test_the_search_finds_the_fewest_micro_batches_that_fit(num_rows, monkeypatch):
    for most in range(1, num_rows + 2):
        found, tried = searched(monkeypatch, num_rows, most)
        fewest = -(-num_rows // min(most, num_rows))
        assert -(-num_rows // found) == fewest and found <= most
        assert -(-num_rows // (found - 1)) > fewest if found > 1 else True  # evenly: no smaller size does with as few
        assert len(tried) <= math.log2(len(rehearsal.candidates(num_rows, ONE))) + 1


def test_a_pipeline_schedule_is_given_micro_batches_that_it_takes(monkeypatch):
    """1F1B of 4 stages takes 8 rows as 4 or 8 micro-batches, so at most 2 rows at once."""
    strategy = Strategy(schedule="1F1B", dims=ParallelDims(pp=4))
    assert searched(monkeypatch, 8, 8, strategy) == (2, [1, 2])


def test_a_row_that_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ConfigurationError, match="too large"):
        searched(monkeypatch, 8, 0)


def test_the_sizes_tried_depend_on_nothing_but_the_outcomes(monkeypatch):
    assert searched(monkeypatch, 16, 6) == (6, [4, 8, 6])


def test_a_restart_does_not_rehearse_again(monkeypatch):
    plan = Plan(recipe(rehearse=True), Strategy(), "x.yaml", ())
    calls = []
    monkeypatch.setattr(rehearsal, "run_stages", lambda plan, ranks: calls.append(plan) or [])
    assert rehearsal.before_training(plan) is plan and calls == [plan]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert rehearsal.before_training(plan) is plan and calls == [plan]


@pytest.mark.parametrize(("evidence", "stays"), [("checkpoints", False), ("stacks", True), ("rejected_model", True)])
def test_evidence_of_a_failure_stays(evidence, stays, tmp_path, monkeypatch):
    def wait(assignment, ranks):
        folder = Path(assignment.plan.recipe.output_dir)
        (folder / evidence).mkdir(parents=True)
        (folder / "status.json").write_text('{"state": "failed", "reason": "no progress"}')
        return HangError.exit_code

    monkeypatch.setattr(rehearsal, "_wait_for_processes", wait)
    plan = Plan(recipe(tmp_path / "run"), Strategy(), "x.yaml", ())
    with pytest.raises(HangError, match="rehearsal: no progress"):
        rehearsal.run_stages(plan, [{}])
    assert (tmp_path / "run").exists() == stays
