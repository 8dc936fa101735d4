"""Processes that prepare rows: the same rows in the same order, whatever their number and wherever a run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from test_data import PAD, batch, random_stream

from samecurve.config.schema import Data
from samecurve.data.batches import StepBatches
from samecurve.data.datasets.base import DocumentRows, PackedRows
from samecurve.data.datasets.base import grouped as by_length
from samecurve.data.datasets.mixture import MixedRows
from samecurve.data.datasets.packed_samples import PackedSampleRows
from samecurve.errors import DataError
from samecurve.metrics.meter import FEWEST_STEPS, WaitAdvice


def grouped(stream):
    return by_length(DocumentRows)(stream, 40, PAD, global_batch_size=8)


def mixed(stream):
    return MixedRows([DocumentRows(stream, 6, PAD), DocumentRows(random_stream(9, 12, seed=1), 6, PAD)], [0.7, 0.3])


KINDS = {
    "packed": lambda stream: PackedRows(stream, 6, PAD),
    "packed documents": lambda stream: PackedSampleRows(stream, 40, PAD),
    "grouped by length": grouped,
    "mixture": mixed,
}


def read(rows, num_workers: int, start_step: int = 0, shard=(1, 2)) -> list:
    batches = StepBatches(rows, 3, batch(8, 2), shard, 7, start_step, num_workers=num_workers)
    return [[{**m.inputs, **m.targets} for m in micro_batches] for micro_batches in batches]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than this machine's cores may be
@pytest.mark.parametrize(
    "kind",
    [
        "packed documents",
        "mixture",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("packed", "grouped by length")),
    ],
)
def test_the_number_of_workers_changes_nothing(kind):
    rows = KINDS[kind](random_stream(60, longest=30))
    expected = read(rows, 0)
    assert len(expected) == 7 and {len(step) for step in expected} == {2}
    for num_workers, start_step in ((1, 0), (3, 0), (3, 4)):  # from the beginning, and a run that goes on
        found = read(rows, num_workers, start_step)
        assert len(found) == 7 - start_step
        for step, others in zip(found, expected[start_step:], strict=True):
            for one, other in zip(step, others, strict=True):
                assert one.keys() == other.keys()
                assert all(one[name].dtype == other[name].dtype for name in one)
                assert all(torch.equal(one[name], other[name]) for name in one)


def test_workers_draw_no_random_number_of_training():
    rows = PackedRows(random_stream(60, longest=30), 6, PAD)
    before = torch.get_rng_state()
    read(rows, 2)
    assert torch.equal(torch.get_rng_state(), before)


class Told(DocumentRows):
    """Its rows say what the process that made them does when it is told to stop."""

    def __getitem__(self, indices):
        found = super().__getitem__(indices)
        ignored = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGUSR1)]
        found.targets["weights"] = np.full(len(indices), os.getpid() if all(ignored) else 0)
        return found


def test_workers_are_other_processes_that_signals_to_all_do_not_end():
    found = {int(m["weights"][0]) for step in read(Told(random_stream(60, longest=30), 6, PAD), 2) for m in step}
    assert len(found) == 2 and not found & {0, os.getpid()}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they live for PyTorch's 5 seconds more")
def test_workers_end_with_a_run_that_is_killed():
    code = (
        "import os, test_loader_workers as here\n"
        "batches = here.StepBatches(here.Told(here.random_stream(60, longest=30), 6, here.PAD), 3, here.batch(8, 2),\n"
        "                           (0, 1), 10**6, num_workers=2)\n"
        "steps = iter(batches)\n"
        "pids = {int(m.targets['weights'][0]) for _ in range(6) for m in next(steps)}\n"
        "print(*pids, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    # its output goes to a file: a pipe would be waited for until the last worker closes it
    with tempfile.TemporaryFile("w+") as stream:
        done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=stream)
        stream.seek(0)
        pids = [int(pid) for pid in stream.read().split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 2
    end = time.monotonic() + 3
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_killed_worker_costs_no_step():
    """The rows stay the same; the death is no exception, least of all in the middle of an update."""
    rows = PackedRows(random_stream(60, longest=30), 6, PAD)
    expected = read(rows, 0)
    before = signal.getsignal(signal.SIGCHLD)
    others = psutil.Process().children()  # of tests before
    batches = StepBatches(rows, 3, batch(8, 2), (1, 2), 7, num_workers=1)
    steps = iter(batches)
    found = [next(steps)]
    (worker,) = set(psutil.Process().children()) - set(others)
    worker.kill()
    time.sleep(0.2)  # PyTorch's handler would raise here
    found += steps
    assert signal.getsignal(signal.SIGCHLD) == before
    assert f"pid {worker.pid}) was killed by SIGKILL; out of memory?" in batches.lost_worker
    for micro_batches, others in zip(found, expected, strict=True):
        for one, other in zip(micro_batches, others, strict=True):
            assert all(torch.equal(one.inputs[name], other[name]) for name in one.inputs)


def test_what_a_worker_cannot_read_is_the_runs_error():
    class Broken(DocumentRows):
        def __getitem__(self, indices):
            raise DataError("row 7 is not there")

    with pytest.raises(DataError, match="row 7 is not there"):
        read(Broken(random_stream(60, longest=30), 6, PAD), 2)


def step(share: float) -> dict:
    return {"step_seconds": 2.0, "data_wait_fraction": share}


def test_waiting_is_told_once_with_what_to_do():
    advice = WaitAdvice(Data(num_workers=2))
    shares = [1.0] + [0.04] * FEWEST_STEPS + [0.2] * 10  # the first step is not looked at
    told = [advice.after(step(share)) for share in shares]
    # (20 * 0.04 + 2 * 0.2) / 22 is the first mean above 5 %
    assert [place for place, text in enumerate(told) if text] == [FEWEST_STEPS + 2]
    assert told[FEWEST_STEPS + 2].startswith(
        "waiting for data took 5% of the time of the last 22 steps: data.num_workers is 2; try 4"
    )


def test_a_run_that_does_not_wait_is_left_alone():
    advice = WaitAdvice(Data())
    assert {advice.after(step(0.049)) for _ in range(200)} == {""}


def test_a_stream_has_another_fix():
    advice = WaitAdvice(Data(streaming=True))
    told = [advice.after(step(0.5)) for _ in range(FEWEST_STEPS + 1)]
    assert "data.streaming=false" in told[-1] and "num_workers" not in told[-1]
