"""Heartbeats of large runs: everything that counts reaches everyone, and nobody reads the files of all ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from samecurve.run import beats, heartbeat
from samecurve.run.beats import Beat
from samecurve.run.heartbeat import Heartbeats
from samecurve.run.liveness import Liveness

NUM_RANKS, PER_HOST, EVERY, LIMIT = 80, 8, 5.0, 60.0
ROUNDS = 4  # of beats, until news has reached everyone


class Run:
    """All ranks of a run in one process, with a clock of its own. silent: ranks that neither write nor read."""

    def __init__(self, folder, num_ranks: int, monkeypatch):
        self.now, self.silent, self.reads = 1000.0, set(), {}
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(heartbeat, "time", clock)
        monkeypatch.setattr(heartbeat, "exists", lambda pid: True)
        self.beats = {rank: self._first_beat(rank) for rank in range(num_ranks)}
        self.ranks: list[Heartbeats] = []
        for rank in range(num_ranks):
            sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": PER_HOST, "LOCAL_RANK": rank % PER_HOST}
            for name, value in sizes.items():
                monkeypatch.setenv(name, str(value))
            self.ranks.append(Heartbeats(folder, lambda rank=rank: self.beats[rank], EVERY, interval=1.0))
            self.ranks[-1].started = True

    def _first_beat(self, rank: int) -> Beat:
        return Beat(rank, os.getpid(), "host", f"machine {rank // PER_HOST}", "step", 3, 5, 0, idle_seconds=1.0)

    def beat(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.now += EVERY
            for rank, own in enumerate(self.ranks):
                if rank not in self.silent:
                    own.write()
                    own.look(at_all=own.wide)

    def change(self, rank: int, **changes) -> None:
        self.beats[rank] = replace(self.beats[rank], **changes)

    def seen_by(self, rank: int) -> Liveness:
        own = self.ranks[rank]
        return Liveness(self.beats[rank], [*own.peers.values()], (), own.looked, self.now, LIMIT, 3 * EVERY)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    made = Run(tmp_path, NUM_RANKS, monkeypatch)
    made.beat(ROUNDS)
    return made


@pytest.mark.parametrize("failed", [0, 8, 77])
def test_a_failure_reaches_all_ranks(failed, run):
    run.ranks[failed].write("failed", f"rank {failed}: no rows", 3)
    run.beat(ROUNDS)
    causes = {str(run.seen_by(rank).cause()) for rank in range(NUM_RANKS) if rank != failed}
    assert causes == {f"rank {failed}: no rows"}


def test_nobody_is_taken_for_frozen_or_hanging_while_all_get_on(run):
    for marks in range(8):
        for rank in range(NUM_RANKS):
            run.change(rank, num_marks=marks + rank % 3)
        run.beat()
        assert not any(run.seen_by(rank).frozen or run.seen_by(rank).hangs for rank in range(NUM_RANKS))


def test_a_frozen_rank_alone_is_named_by_all_others(run):
    run.silent = {77}
    run.beat(12)
    for rank in {*range(NUM_RANKS)} - run.silent:
        assert [peer.beat.rank for peer in run.seen_by(rank).frozen] == [77], rank


@pytest.mark.parametrize("silent", [0, pytest.param(72, marks=pytest.mark.full)])
def test_a_host_whose_first_rank_is_frozen_is_not_accused_as_a_whole(silent, run):
    """What it passed on does not change any more either."""
    run.silent = {silent}
    run.beat(12)
    assert {peer.beat.rank for rank in (1, 8, 73) for peer in run.seen_by(rank).frozen} == {silent}
    run.change(74, state="failed", reason="rank 74: out of memory", exit_code=1)
    run.ranks[74].write("failed", "rank 74: out of memory", 1)
    run.beat(ROUNDS)
    assert "rank 74" in str(run.seen_by(0 if silent else 75).cause())


def test_the_rank_that_lags_is_named_and_one_that_gets_on_keeps_the_others_waiting(run):
    for rank in range(NUM_RANKS):
        run.change(rank, idle_seconds=LIMIT + 1, num_phases=9)
    run.change(67, num_phases=8, phase="data")
    run.beat(ROUNDS)
    assert run.seen_by(5).hangs and run.seen_by(5).describe_hang("").startswith("rank 67 ")
    run.change(50, idle_seconds=2.0)
    run.beat(ROUNDS)
    assert not any(run.seen_by(rank).hangs for rank in range(NUM_RANKS))


@pytest.mark.parametrize("num_ranks", [NUM_RANKS, pytest.param(512, marks=pytest.mark.full)])
def test_the_number_of_files_that_are_read(num_ranks, tmp_path, monkeypatch):
    run = Run(tmp_path, num_ranks, monkeypatch)
    run.beat(ROUNDS)
    paths, read = [], beats.read_record
    for module in (beats, heartbeat):
        monkeypatch.setattr(module, "read_record", lambda path, *schema: paths.append(path) or read(path, *schema))
    for rank, most in ((0, PER_HOST + num_ranks // PER_HOST - 1), (1, PER_HOST + 1), (8, PER_HOST + 1)):
        paths.clear()
        run.ranks[rank].look(at_all=True)  # as before a rank takes it for a hang
        assert len(paths) == most, (rank, len(paths))
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert max(sizes) < 8000, "the files that pass heartbeats on do not grow with the run"


def test_the_files_of_an_earlier_session_are_removed(run, tmp_path):
    assert (tmp_path / "world.json").exists() and (tmp_path / "host_00008.json").exists()
    run.ranks[0].clear()
    assert list(tmp_path.iterdir()) == []


def test_a_small_run_has_no_such_files(tmp_path, monkeypatch):
    run = Run(tmp_path, 16, monkeypatch)
    run.beat(2)
    assert {path.name for path in tmp_path.iterdir()} == {f"rank_{rank:05d}.json" for rank in range(16)}
