"""Saving as the loop sees it, with one process and the disk of a test."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from samecurve.accelerator.sharded_state import DTensorShards, Zero3Shards
from samecurve.checkpoint import commit
from samecurve.checkpoint.manager import Checkpoints, TrainProgress
from samecurve.checkpoint.manifest import step_of
from samecurve.config.schema import Checkpoint, Optimizer
from samecurve.distributed.control_group import ControlGroup, StopVote
from samecurve.errors import CheckpointError, DataError, NumericError, Preempted, StorageError
from samecurve.optim.factory import build_optimizer, state_names
from samecurve.run.run_directory import RunDirectory
from samecurve.storage.filesystem import PIECE_BYTES, LocalFileSystem
from samecurve.training import session as session_module
from samecurve.training.session import Session

EVERY, LOOK = 8, 2  # a quarter of the steps after a save it is seen whether that failed


@pytest.fixture
def engine():
    parameters = {name: nn.Parameter(torch.ones(4, 4)) for name in "ab"}
    settings = Optimizer(name="sgd", learning_rate=0.1)
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    optimizer = build_optimizer([{"params": [*parameters.values()]}], settings)
    state = DTensorShards(parameters, optimizer, state_names(settings, shapes, set()), (0, 1), None, {})
    return SimpleNamespace(shapes=shapes, state=state, device=torch.device("cpu"), shard=(0, 1), loss_scale_state={})


@pytest.fixture
def make(tmp_path):
    def made(background: bool = True, keep: int = 9) -> Checkpoints:
        recipe = SimpleNamespace(seed=0, checkpoint=Checkpoint(every_steps=EVERY, keep=keep))
        run = RunDirectory(tmp_path, resume="auto")
        return Checkpoints(run, recipe, {}, ControlGroup(), print, background=background)

    return made


def saved(folder) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


def test_the_wait_for_a_slow_save_is_told_as_a_stall(engine, make, tmp_path, monkeypatch):
    """It is in the loop, and would be some step's time."""
    checkpoints, go_on = make(), threading.Event()
    written = commit.write_file
    monkeypatch.setattr(commit, "write_file", lambda *what: go_on.wait(10) and written(*what))
    checkpoints.save(engine, TrainProgress(EVERY))
    assert [step for step in range(EVERY + 1, 2 * EVERY) if checkpoints.due(step, False)] == [EVERY + LOOK]
    threading.Timer(1.0, go_on.set).start()
    checkpoints.save(engine, TrainProgress(EVERY + LOOK))
    assert checkpoints.finished()["save_stall_seconds"] > 0.2
    assert saved(tmp_path) == ["step_00000008"]


def test_a_resumed_run_keeps_no_more_than_another(engine, make, tmp_path):
    """The checkpoint that it resumed from stays until there are as many newer ones."""
    checkpoints = make(background=False, keep=2)
    for step in (8, 16):
        checkpoints.save(engine, TrainProgress(step))
    checkpoints._run.close()
    resumed = make(background=False, keep=2)
    resumed.resumed_from = tmp_path / "checkpoints" / "step_00000008"
    resumed.save(engine, TrainProgress(24))
    assert saved(tmp_path) == ["step_00000008", "step_00000016", "step_00000024"]
    resumed.save(engine, TrainProgress(32))
    assert saved(tmp_path) == ["step_00000024", "step_00000032"]


def test_where_nothing_is_being_written_there_is_nothing_to_see(engine, make):
    checkpoints = make(background=False)
    assert not checkpoints.due(LOOK, False)
    checkpoints.save(engine, TrainProgress(EVERY))
    assert not checkpoints.due(EVERY + LOOK, False)


def test_a_save_that_failed_is_made_up_for_soon(engine, make, tmp_path, monkeypatch):
    def full(*_):
        raise StorageError("no space left on device")

    checkpoints = make()
    with monkeypatch.context() as disk:
        disk.setattr(commit, "write_file", full)
        checkpoints.save(engine, TrainProgress(EVERY))
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
    assert checkpoints.due(EVERY + LOOK, False)
    checkpoints.save(engine, TrainProgress(EVERY + LOOK))
    assert checkpoints.wait() and saved(tmp_path) == ["step_00000010"]


def test_the_size_is_known_before(engine, make, tmp_path):
    checkpoints = make()
    expected = checkpoints.num_bytes(engine)
    assert expected == 2 * 16 * 4 * 2  # two weights of 16 values with their momentum, in fp32
    checkpoints.save(engine, TrainProgress(EVERY), wait=True)
    (file,) = tmp_path.glob("checkpoints/*/rank_*.safetensors")
    assert expected < file.stat().st_size < expected + (16 << 10)  # with generators and a header


def test_who_asks_for_this_very_step_gets_it(engine, make, tmp_path):
    checkpoints = make()
    checkpoints.save(engine, TrainProgress(EVERY))
    checkpoints.secure(engine, TrainProgress(EVERY + LOOK))
    assert saved(tmp_path) == ["step_00000008", "step_00000010"]


@pytest.mark.parametrize("harm", ["disk", "weights"])
def test_after_a_save_that_failed_the_engine_has_nothing_open(harm, engine, make, tmp_path, monkeypatch):
    """ZeRO-3's optimizer lies on NVMe in between: what was swapped in for the save has to make room for the step."""
    visit, closed = engine.state.visit, []

    def visited():
        try:
            yield from visit()
        finally:
            closed.append(True)

    def sync(_self, _file):
        raise OSError(5, "input/output error")

    monkeypatch.setattr(engine.state, "visit", visited)
    if harm == "disk":
        monkeypatch.setattr(LocalFileSystem, "sync", sync)
    else:
        next(iter(visit()))[2][0] = torch.nan
    with pytest.raises(NumericError) if harm == "weights" else nullcontext():
        make(background=False).save(engine, TrainProgress(EVERY))
    assert closed == [True] and saved(tmp_path) == []


def test_a_group_on_nvme_is_given_back_whatever_happens():
    calls = []
    zero = SimpleNamespace(
        fp16_groups=[[torch.zeros(1)]],
        fp32_partitioned_groups_flat=[torch.zeros(1)],
        _swappable_optimizer_subgroup=lambda index: True,
        _optimizer_states_and_gradient_swap_in=lambda index: calls.append("in"),
        _release_swap_buffers=lambda index: calls.append("release"),
    )
    state = Zero3Shards({}, zero, {}, 0)
    with pytest.raises(KeyError):  # its parameter is unknown to the state
        list(state.visit())
    assert calls == ["in", "release"]


def other_disk(old, new):
    raise OSError(errno.EXDEV, "cross-device link")


def test_a_disk_that_takes_its_time_is_not_taken_for_a_hang(tmp_path, monkeypatch):
    """watchdog.timeout_seconds is without progress; reading, syncing, moving and removing what is large has some."""
    calls = []
    disk, folder = LocalFileSystem(lambda: calls.append(True)), tmp_path / "step_00000008"
    folder.mkdir()
    for name in ("a", "b"):
        with disk.create(folder / name) as file:
            file.write(b"0" * (2 * PIECE_BYTES))
            disk.sync(file)
    assert len(calls) == 2
    assert sum(map(len, disk.read(folder / "a"))) == 2 * PIECE_BYTES and len(calls) == 4
    (tmp_path / "another").mkdir()
    monkeypatch.setattr(os, "rename", other_disk)
    disk.move_folder(folder, tmp_path / "another")
    folder = tmp_path / "another" / folder.name
    assert len(calls) == 8 and (folder / "b").read_bytes() == b"0" * (2 * PIECE_BYTES)
    disk.remove_folder(folder)
    assert len(calls) == 10 and not folder.exists()


def a_session(engine, checkpoints, lines, is_pending, **parts) -> Session:
    context = SimpleNamespace(
        world=ControlGroup(),
        progress=SimpleNamespace(log=lines.append),
        watch=SimpleNamespace(phase=lambda *_: None, watchdog=SimpleNamespace(cause=lambda: None), requested="SIGTERM"),
        recipe=SimpleNamespace(checkpoint=SimpleNamespace(mirror=None), steps=9),
    )
    parts |= {"context": context, "engine": engine, "checkpoints": checkpoints, "stop_vote": StopVote(context.world)}
    parts["guard"] = SimpleNamespace(is_pending=is_pending)
    return Session(**dict.fromkeys(Session.__dataclass_fields__) | parts)


def test_samples_are_of_rows_that_exist_and_do_not_undo_an_evaluation(engine, make, tmp_path, monkeypatch):
    """The evaluation has been counted for evaluate.patience, so that its metrics have to be in the record by then."""

    def out_of_memory(_, rows, *others):
        assert rows == ["held out"]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(session_module, "write_samples", out_of_memory)
    task = SimpleNamespace(validation=SimpleNamespace(parts=([], ["held out"])), tokenizer=None)
    session = a_session(engine, make(), [], False, built=SimpleNamespace(task=task), validation=object())
    session.context.recipe.evaluate = SimpleNamespace(samples=2)
    session.context.recipe.compile = "off"
    session.context.run = SimpleNamespace(path=tmp_path)
    session.context.watch.progress = None
    session.context.evaluate = lambda *_: {"eval_loss": 2.0}
    record = {"step": 3}
    with pytest.raises(RuntimeError, match="out of memory"):
        session.evaluate(record)
    assert record == {"step": 3, "eval_loss": 2.0}


@pytest.mark.parametrize("is_pending", [False, True])
def test_a_request_to_stop_does_not_save_refused_steps(is_pending, engine, make):
    checkpoints = make()
    parts = {"batches": SimpleNamespace(lost_worker=""), "early_stopping": SimpleNamespace(is_over=False)}
    session = a_session(engine, checkpoints, [], is_pending, **parts)
    says = "SIGTERM: not saved after step 3, which was refused" if is_pending else "SIGTERM: saved after step 3"
    with pytest.raises(Preempted, match=says):
        session.stop_if_asked(TrainProgress(step=3, updates=3, samples=24))
    assert [step_of(folder) for folder in checkpoints._run.checkpoints.glob("step_*")] == [3] * (not is_pending)


@pytest.mark.parametrize(
    ("error", "whole", "is_pending", "saves"),
    [
        (ValueError("of an evaluation"), True, False, True),
        (DataError("of a row"), True, False, True),
        (ValueError("in an update"), False, False, False),
        (ValueError("after a refused step"), True, True, False),
        (NumericError("nan"), True, False, False),
        (StorageError("full"), True, False, False),
        (CheckpointError("damaged"), True, False, False),
        (Preempted("saved"), True, False, False),
    ],
)
def test_an_error_between_steps_saves_first(engine, make, error, whole, is_pending, saves, monkeypatch):
    checkpoints, lines = make(), []
    checkpoints.resumable_at = TrainProgress(step=3, updates=3, samples=24) if whole else None
    session = a_session(engine, checkpoints, lines, is_pending)
    with pytest.raises(type(error), match=str(error)), session.saving():
        raise error
    assert [step_of(folder) for folder in checkpoints._run.checkpoints.glob("step_*")] == [3] * saves
    session.context.watch.watchdog.cause = lambda: "rank 1 died"
    monkeypatch.setattr(checkpoints, "secure", lambda *_: pytest.fail("the other rank never comes"))
    with pytest.raises(type(error)), session.saving():
        raise error
    if saves:
        assert lines == [f"{type(error).__name__} after step 3: saved; the same command resumes from there"]
