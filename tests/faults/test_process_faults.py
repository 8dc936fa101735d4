"""What happens to a run from outside or on its disk, once for each mechanism every day.

test_full_processes.py has every phase, signal, launcher and strategy. Faults come one after another to the same run,
which has to end in the same bits as if nothing had happened.
"""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
from battery import SINGLE, Case, Expected, Victim
from started import Started, send

DEAD = r"rank {} \(pid \d+\) died"
PREEMPTED = r"preempted \(exit code 75\): {}: saved after step \d+"


def test_a_rank_killed_while_it_writes(battery):
    victim = battery.victim()
    victim.hurt("kill", "SIGKILL save.write", Expected(1, DEAD.format(1), 5), faults="save.write@2:1:kill")
    victim.finish()


def signalled(victim: Victim, number: signal.Signals, who: str, launcher: str = "", told: str = "") -> None:
    """The session's third step takes three seconds, in which the signal comes."""
    expected = Expected(75, PREEMPTED.format(told or number.name), state="preempted", lost=0)
    do = send(who, number, after_step=victim.newest() + 2)
    victim.hurt("signal", f"{number.name} to {who}", expected, faults="step@3:0:slow", do=do, launcher=launcher)


def test_a_signal(battery):
    victim = battery.victim()
    signalled(victim, signal.SIGTERM, "launcher")
    victim.finish()


@pytest.mark.full
def test_a_dead_launcher_and_a_second_signal(battery):
    victim = battery.victim()
    expected = Expected(75, PREEMPTED.format("the launcher ended"), state="preempted", lost=0)
    do = send("launcher", signal.SIGKILL, after_step=victim.newest() + 2)
    victim.hurt("signal", "SIGKILL to launcher", expected, faults="step@3:0:slow", do=do)
    at_once = Expected(143, r"ended by SIGTERM in phase \w+ of step \d+ \(exit code 143\)")
    victim.hurt("signal", "SIGTERM twice", at_once, faults="step@3:0:slow", do=twice)
    victim.finish()


def twice(started: Started) -> None:
    metrics = started.directory / "metrics.jsonl"
    send("rank 0", signal.SIGTERM, after_step=len(metrics.read_text().splitlines()) + 2)(started)
    time.sleep(1.5)  # within a second it would count as the same request
    started.ranks()[0].send_signal(signal.SIGTERM)


@pytest.mark.full
def test_a_signal_to_accelerate_with_one_process(battery):
    victim = battery.victim(SINGLE)
    # accelerate passes nothing on to a single process: the launcher is gone, which is the same request
    signalled(victim, signal.SIGTERM, "launcher", "accelerate", "the launcher ended")
    victim.finish()


def test_a_killed_data_worker(battery):
    """All ranks save at the same step, say what to do, and leave a run that goes on as if nothing had happened."""

    def kill(started: Started) -> None:
        started.wait_for_step(2)
        workers = [child for child in started.ranks()[1].children() if child.name().startswith(("python", "pt_"))]
        workers[0].kill()

    victim = battery.victim()
    says = r"rank 1: a process that prepares data \(pid \d+\) was killed by SIGKILL; out of memory\? .*saved after step"
    expected = Expected(1, says, lost=0)
    output = victim.hurt(
        "kill", "SIGKILL of a data worker", expected, "data.num_workers=1", faults="step@5:0:slow", do=kill
    )
    assert output.count("WorkerError (exit code 1)") == 1
    victim.finish()


def test_ranks_that_stop_answering(battery):
    victim = battery.victim()
    says = r"no progress for 10 s \(watchdog.timeout_seconds\): rank 1 \(pid \d+\) has been in phase \w+"
    says += r" of step 6 .* while rank 0 is in phase step of step 7"
    output = victim.hurt(
        "hang", "deadlock", Expected(124, says, 5), "watchdog.timeout_seconds=10", faults="step@7:1:hang"
    )
    assert output.count("HangError (exit code 124)") == 1
    stacks = sorted((victim.directory / "stacks").iterdir())
    assert [path.name for path in stacks] == ["rank_00000.txt", "rank_00001.txt"]
    assert all("train.py" in path.read_text() for path in stacks)
    victim.finish()


@pytest.mark.full
def test_a_full_disk_once(battery):
    victim = battery.victim()
    says = r"the checkpoint of step 10 was not written: .*rank 1: .*ENOSPC"
    victim.hurt("disk", "ENOSPC once", Expected(0, says, 25, "done"), faults="save.write@2:1:enospc")
    saved = {folder.name for folder in (victim.directory / "checkpoints").iterdir()}
    assert "step_00000010" not in saved and {"step_00000005", "step_00000015", "step_00000020"} <= saved
    assert not [name for name in saved if name.startswith(".")]
    victim.is_golden()


STAYS_FULL = r"StorageError \(exit code 7\)\n3 saves in a row failed"


@pytest.mark.full
def test_a_full_disk_that_stays_full(battery):
    victim = battery.victim(SINGLE)
    always = Expected(7, STAYS_FULL, 0, lost=None)
    victim.hurt("disk", "ENOSPC always", always, faults="save.fsync@*:0:enospc")
    victim.finish()


@pytest.mark.full
def test_a_full_disk_at_the_end(battery):
    """The last save is tried three times."""
    victim = battery.victim(SINGLE)
    at_last = ",".join(f"save.fsync@{visit}:0:enospc" for visit in (5, 6, 7))
    victim.hurt("disk", "ENOSPC in the last save", Expected(7, STAYS_FULL, 20), faults=at_last)
    victim.finish()


@pytest.mark.full
def test_torchrun_restarts_by_itself(battery):
    victim = battery.victim()
    expected = Expected(0, r"resuming after step 5 in", 25, "done")
    victim.hurt("kill", "SIGKILL, --max-restarts", expected, "--max-restarts=3", faults="step@8/0:1:kill")
    victim.is_golden()


@pytest.mark.full
def test_what_fails_at_the_same_step_stops(battery):
    victim = battery.victim(Case(None, 1, "torchrun"))
    expected = Expected(1, r"step 3 failed 3 times in a row", 0)
    victim.hurt("kill", "SIGKILL, same step", expected, "--max-restarts=3", faults="step@3:0:kill")
    victim.write(None)


@pytest.mark.full
def test_what_may_not_change_is_refused_and_fresh_moves_it_aside(battery):
    victim = battery.victim(SINGLE)
    victim.hurt("kill", "SIGKILL of a single process", Expected(None, "", 10, "running"), faults="step@13:0:kill")
    before = contents(victim)
    started = victim.start("", "", "--resume", "none")
    started.wait()
    assert started.process.returncode == 4 and "--fresh" in started.output
    documents = victim.directory.parent / "other.jsonl"
    documents.write_text("".join(json.dumps({"text": f"other words {n}"}) + "\n" for n in range(50)))
    started = victim.start("", "", "seed=4", f"data.path={documents}", "model.config.num_hidden_layers=3", "steps=8")
    started.wait()
    assert started.process.returncode == 4, started.output
    assert started.output.count("CheckpointError (exit code 4)") == 1
    for reason in ("seed: 3 -> 4", "model.num_hidden_layers: 4 -> 3", "rows: ", "steps: 8, but"):
        assert started.output.count(reason) == 1, (reason, started.output)
    assert contents(victim) == before
    run = victim.finish("--fresh")
    assert run.facts["resumed_from"] is None
    (moved,) = victim.directory.glob("previous/*/checkpoints")
    assert {path.relative_to(moved).as_posix(): path.read_bytes() for path in moved.rglob("*.*")} == before


def contents(victim: Victim) -> dict[str, bytes]:
    folder = victim.directory / "checkpoints"
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    assert any(re.match(r"step_\d+/rank_00000", name) for name in found)
    return found
