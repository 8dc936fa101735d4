"""Runs that do not get on: dead, failed, frozen and hanging ranks, seen by the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
from surrounded import ranks, status, wait_until

from samecurve.errors import HangError, PeerError
from samecurve.run import heartbeat, watchdog
from samecurve.run.beats import Beat, Peer, file_name, write_beat
from samecurve.run.heartbeat import Heartbeats
from samecurve.run.liveness import Liveness
from samecurve.run.watchdog import HangWatchdog
from samecurve.storage.file_lock import machine

STEP = "meet(watch)\nwatch.phase('step', 12)\nready()\nwait()\ntime.sleep(60)"
LIMIT = 2.0
ONE = "heartbeats/rank_00001.json"


def stacks(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "stacks").iterdir()}


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_others(dead, tmp_path):
    with ranks(tmp_path / "run", STEP, STEP) as pair:
        for rank in pair:
            rank.wait_until("ready")
        victim, other = pair[dead], pair[1 - dead]
        victim.process.kill()  # and it stays a zombie until the end of the test
        start = time.monotonic()
        assert other.ends(10) == 1
        assert time.monotonic() - start < 8
        pid = victim.process.pid
    found = status(other.folder)
    assert found["reason"].startswith(
        f"rank {dead} (pid {pid}) died, while rank {1 - dead} was in phase step of step 12;"
    )
    assert (found["state"], found["exit_code"]) == ("failed", 1)
    assert other.said.count("died") == 1 and "PeerError (exit code 1)" in other.said


def test_deaths_are_seen_while_the_model_is_built_too(tmp_path):
    body = "meet(watch)\nready()\nwait()\ntime.sleep(60)"
    with ranks(tmp_path / "run", body, body, timeout_seconds=LIMIT) as (first, second):
        for rank in (first, second):
            rank.wait_until("ready")
        second.process.kill()
        assert first.ends(10) == 1
    assert "died, while rank 0 was in phase build;" in status(first.folder)["reason"]


def test_a_rank_that_is_through_is_not_dead(tmp_path):
    body = "meet(watch)\nwatch.phase('export')\ntime.sleep(6)"
    with ranks(tmp_path / "run", body, "meet(watch)") as (first, second):
        assert second.ends() == 0
        assert first.ends() == 0
    assert status(first.folder)["state"] == "done" and first.said == ""
    assert not (first.folder / "stacks").exists()  # nothing to tell


def test_one_lone_rank_that_hangs(tmp_path):
    with ranks(tmp_path / "run", STEP, timeout_seconds=LIMIT) as [rank]:
        assert rank.ends() == 124
    text = "no progress for 2 s (watchdog.timeout_seconds): rank 0 is in phase step of step 12"
    reason = f"{text}; the stacks of all ranks are in {rank.folder / 'stacks'}"
    assert status(rank.folder) == {"state": "failed", "reason": reason, "step": 0, "exit_code": 124}
    assert rank.said == f"ready\n\nHangError (exit code 124)\n{reason}\n"
    [(name, dump)] = stacks(rank.folder).items()
    assert name == "rank_00000.txt" and dump.startswith("rank 0 (pid ")
    assert "in wait" in dump and "watchdog.py" in dump  # the main thread's stack and those of the others


def test_a_rank_that_crashes_writes_where(tmp_path):
    crash = "meet(watch)\nwatch.phase('export')\nready()\nwait()\nimport ctypes\nctypes.string_at(0)"
    with ranks(tmp_path / "run", crash, STEP) as (first, second):
        first.wait_until("ready")
        first.go_on()
        assert first.ends() == -signal.SIGSEGV
        assert second.ends(10) == 1
    text = stacks(first.folder)["rank_00000.txt"]
    assert text.startswith("Fatal Python error: Segmentation fault") and "string_at" in text


@pytest.mark.full  # every day one rank hangs, and two of which one lags
def test_all_ranks_hang_in_one_phase(tmp_path):
    with ranks(tmp_path / "run", STEP, STEP, timeout_seconds=LIMIT) as (first, second):
        assert (first.ends(), second.ends()) == (124, 124)
    assert ": all 2 ranks that can be seen are in phase step of step 12;" in status(first.folder)["reason"]
    assert first.said.count("HangError") == 1 and "HangError" not in second.said
    dumps = stacks(first.folder)
    assert set(dumps) == {"rank_00000.txt", "rank_00001.txt"}
    assert all("in wait" in dump for dump in dumps.values())


def test_the_rank_that_lags_is_named(tmp_path):
    lagging = STEP.replace("watch.phase('step', 12)", "watch.phase('data', 12)")
    bodies = STEP.replace("watch.phase", "watch.phase('data', 12)\nwatch.phase"), lagging
    with ranks(tmp_path / "run", *bodies, timeout_seconds=LIMIT) as (first, second):
        assert first.ends() == 124
        pid = second.process.pid
    reason = status(first.folder)["reason"]
    assert f"rank 1 (pid {pid}) has been in phase data of step 12 for " in reason
    assert ", while rank 0 is in phase step of step 12;" in reason


@pytest.mark.parametrize("frozen", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_stopped_rank_is_named_and_does_not_stay(frozen, tmp_path):
    with ranks(tmp_path / "run", STEP, STEP, timeout_seconds=LIMIT) as pair:
        for rank in pair:
            rank.wait_until("ready")
        victim, other = pair[frozen], pair[1 - frozen]
        victim.process.send_signal(signal.SIGSTOP)
        assert other.ends() == 124
        assert victim.ends(5) == -signal.SIGVTALRM
        pid = victim.process.pid
    found = status(other.folder)
    assert f": rank {frozen} (pid {pid}) shows no sign of life" in found["reason"] and found["exit_code"] == 124
    dumps = stacks(other.folder)
    assert "in wait" in dumps[f"rank_{frozen:05d}.txt"] and "in wait" in dumps[f"rank_{1 - frozen:05d}.txt"]


def test_a_rank_that_stops_while_the_model_is_built(tmp_path):
    body = "meet(watch)\nready()\nwait()\ntime.sleep(60)"
    with ranks(tmp_path / "run", body, body, timeout_seconds=LIMIT) as (first, second):
        for rank in (first, second):
            rank.wait_until("ready")
        second.process.send_signal(signal.SIGSTOP)
        assert first.ends(10) == 124
        assert second.ends(5) == -signal.SIGVTALRM
    reason = status(first.folder)["reason"]
    assert "shows no sign of life" in reason and "last seen in phase build;" in reason
    assert set(stacks(first.folder)) == {"rank_00000.txt", "rank_00001.txt"}


def test_a_run_that_slept_as_a_whole_goes_on(tmp_path):
    body = STEP.replace("time.sleep(60)", "")
    with ranks(tmp_path / "run", body, body, timeout_seconds=4) as pair:
        for rank in pair:
            rank.wait_until("ready")
        for rank in pair:
            rank.process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        for rank in pair:
            rank.process.send_signal(signal.SIGCONT)
        time.sleep(2.8)  # more than the grace, less than the limit
        for rank in pair:
            rank.go_on()
        assert [rank.ends() for rank in pair] == [0, 0]


def test_signs_of_life_count_as_progress(tmp_path):
    body = "meet(watch)\nwatch.phase('evaluate', 12)\nfor _ in range(16):\n    time.sleep(0.2)\n    watch.progress()"
    with ranks(tmp_path / "run", body, timeout_seconds=LIMIT) as [rank]:
        assert rank.ends() == 0, rank.said


def test_starting_may_take_its_time(tmp_path):
    with ranks(tmp_path / "run", "ready()\ntime.sleep(3)", timeout_seconds=LIMIT) as [rank]:
        assert rank.ends() == 0, rank.said


def test_stacks_on_demand(tmp_path):
    body = "ready()\nwait()\nmeet(watch)\nwatch.phase('step', 1)\nwait()"
    with ranks(tmp_path / "run", body) as [rank]:
        rank.wait_until("ready")
        rank.process.send_signal(signal.SIGUSR2)
        rank.wait_until("in wait")  # while it starts: stderr
        rank.go_on()
        file = rank.folder / "stacks" / "rank_00000.txt"
        wait_until(file.exists)
        time.sleep(0.2)
        rank.process.send_signal(signal.SIGUSR2)
        wait_until(lambda: "in wait" in file.read_text())
        rank.go_on()
        assert rank.ends() == 0
    assert file.exists()


def test_who_asks_for_stacks_does_not_harm_the_run(tmp_path):
    """faulthandler's own handler reads frames of threads that run meanwhile: of 3,000 times it crashed a few."""
    busy = """
import threading
def deep(n): return n and deep(n - 1)
def work():
    while True:
        exec("def fresh(): return 1\\nfresh()")
        deep(20)
threading.Thread(target=work, daemon=True).start()
meet(watch)
watch.phase("step", 1)
ready()
wait()
"""
    with ranks(tmp_path / "run", busy) as [rank]:
        rank.wait_until("ready")
        file = rank.folder / "stacks" / "rank_00000.txt"
        for _ in range(3000):
            rank.process.send_signal(signal.SIGUSR2)
            time.sleep(0.001)
        wait_until(lambda: "in work" in file.read_text() and "in wait" in file.read_text())
        rank.go_on()
        assert rank.ends() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="a signal to one thread of another process")
def test_a_stopped_rank_writes_its_stacks_and_does_nothing_else(tmp_path):
    stops = "meet(watch)\nwatch.phase('step', 12)\nos.kill(os.getpid(), signal.SIGSTOP)\nopen(sys.argv[1] + '_on', 'w')"
    with ranks(tmp_path / "run", STEP, stops, timeout_seconds=LIMIT) as (first, second):
        assert first.ends() == 124
        assert second.ends(5) == -signal.SIGVTALRM
    assert "in main\n" in stacks(first.folder)["rank_00001.txt"]
    assert not (tmp_path / "run_on").exists()


def test_what_was_on_this_machine_before_the_start_is_an_earlier_sessions(heartbeats):
    """Where hosts share no directory, rank 0 clears its own only, and another host may have been rank 0's before."""
    write_beat(heartbeats.folder, beat(state="failed", time=time.time() - 60))
    heartbeats.look()
    assert heartbeats.peers == {}


def beat(**changes) -> Beat:
    own = Beat(1, os.getpid(), "here", machine(), "step", 3, 5, 0, 0.0, time=time.time() + 1)
    return replace(own, **changes)


@pytest.fixture
def heartbeats(tmp_path) -> Heartbeats:
    return Heartbeats(tmp_path / "beats", lambda: beat(rank=0), every=5.0, interval=1.0)


def test_files_of_an_earlier_session_and_broken_ones_are_not_seen(heartbeats):
    """Whatever the clock of the host says that wrote them."""
    write_beat(heartbeats.folder, beat(state="failed", time=time.time() + 90))
    heartbeats.clear()
    (heartbeats.folder / "rank_00002.json").write_text('{"rank": 2')
    (heartbeats.folder / "rank_00003.json").write_text('{"rank": 3}')
    heartbeats.look()
    assert heartbeats.peers == {}
    write_beat(heartbeats.folder, beat(time=time.time() - 600, machine="another"))
    heartbeats.look()
    assert list(heartbeats.peers) == [1]


def test_rank_0_clears_what_an_earlier_session_left(tmp_path, monkeypatch):
    for rank in (1, 0):
        write_beat(tmp_path / "heartbeats", beat())
        monkeypatch.setenv("RANK", str(rank))
        with HangWatchdog(tmp_path, 60, lambda _: None):
            assert list((tmp_path / "heartbeats").iterdir()) == ([] if rank == 0 else [tmp_path / ONE])


def test_a_last_word_is_not_lost_while_a_beat_is_written_slowly(heartbeats, monkeypatch):
    heartbeats.started = True
    began, goes_on, replace_file = threading.Event(), threading.Event(), os.replace

    def slowly(*paths):
        began.set()
        goes_on.wait(20)
        replace_file(*paths)

    monkeypatch.setattr(os, "replace", slowly)
    beat_writer = threading.Thread(target=heartbeats.write, daemon=True)
    beat_writer.start()
    assert began.wait(20)
    last_word = threading.Thread(target=heartbeats.write, args=("failed", "rank 0: no rows", 3), daemon=True)
    last_word.start()
    last_word.join(0.2)
    assert last_word.is_alive()
    goes_on.set()
    beat_writer.join(20)
    last_word.join(20)
    heartbeats.write()  # nor by the next beat
    content = json.loads((heartbeats.folder / file_name(0)).read_text())
    assert (content["state"], content["reason"], content["exit_code"]) == ("failed", "rank 0: no rows", 3)


def test_what_is_not_read_any_more_is_not_known(tmp_path, monkeypatch):
    """Its beat would never change again; a failure counts for ever."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    heartbeats = Heartbeats(tmp_path / "beats", lambda: beat(rank=0), every=5.0, interval=1.0)
    for rank, state in ((1, "running"), (2, "running"), (3, "failed")):
        write_beat(heartbeats.folder, beat(rank=rank, machine="another", state=state))
    heartbeats.look()
    assert set(heartbeats.peers) == {1, 2, 3}
    heartbeats.look(at_all=False)
    assert set(heartbeats.peers) == {1, 3}


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_process_ids_of_another_machine_mean_nothing(heartbeats):
    """Cloned machines with one host name, or containers with process ids of their own, on one directory."""
    pid = ended_process()
    write_beat(heartbeats.folder, beat(pid=pid, machine="another"))
    write_beat(heartbeats.folder, beat(pid=pid, rank=2))
    heartbeats.look()
    assert {rank: peer.died for rank, peer in heartbeats.peers.items()} == {1: False, 2: True}


def test_a_last_word_after_the_process_is_gone_counts(heartbeats):
    other = beat(pid=ended_process())
    write_beat(heartbeats.folder, other)
    heartbeats.look()
    assert heartbeats.peers[1].died
    write_beat(heartbeats.folder, replace(other, state="finished"))
    heartbeats.look()
    assert not heartbeats.peers[1].died and heartbeats.peers[1].ended is None


def test_a_process_exists_until_it_is_a_zombie():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert heartbeat.exists(process.pid)
    process.stdin.close()
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert not heartbeat.exists(process.pid)
    process.wait()
    assert not heartbeat.exists(process.pid)


@pytest.mark.parametrize("idle", [0.1, 60.0])
def test_a_rank_of_another_host_that_gets_on(idle, tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(watchdog, "last_resort", lambda code: threading.Timer(0, print))  # it would end the tests
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.1)
    busy, errors = beat(rank=2, machine="another", idle_seconds=idle), []
    with HangWatchdog(tmp_path, 2, errors.append, interval=0.05) as watch:
        watch.phase("save", 12)
        began, marks = time.monotonic(), 0
        while time.monotonic() - began < 3:
            marks += 1
            write_beat(watch.heartbeats.folder, replace(busy, num_marks=marks))
            time.sleep(0.1)
    assert [type(error) for error in errors] == ([HangError] if idle > 1 else [])


NOW = 10_000.0  # a moment of time.monotonic


def seen(*peers: Peer, own: Beat | None = None, given_up: tuple = (), looked: float = 0.0) -> Liveness:
    """What rank 1 sees: in phase save with a limit of 60 s unless `own` says otherwise. looked: seconds ago."""
    return Liveness(own or beat(phase="save", num_phases=1), peers, given_up, NOW - looked, NOW, limit=60.0, stale=15.0)


def peer(rank: int, age: float = 0.0, ended: float | None = None, **changes) -> Peer:
    """age: seconds since its heartbeat changed. ended: seconds since it was seen failed or gone."""
    return Peer(beat(rank=rank, **changes), NOW - age, None if ended is None else NOW - ended)


def test_before_a_rank_takes_it_for_a_hang_it_looks_at_all_hosts():
    """Otherwise it reads its own machine's files and rank 0's only."""
    assert seen(own=beat(phase="save", idle_seconds=59)).may_hang_soon
    assert not seen(own=beat(phase="build", idle_seconds=59)).may_hang_soon
    assert not seen(own=beat(phase="save", idle_seconds=44)).may_hang_soon


def test_who_speaks():
    assert seen().is_reporter and not seen().replaces_rank_0  # alone, as far as it sees
    assert not seen(peer(0), peer(2)).is_reporter
    assert not seen(own=beat(num_phases=0)).is_reporter  # nobody has met anybody yet
    frozen = seen(peer(0, age=1000))
    assert frozen.is_reporter and frozen.replaces_rank_0
    woken = seen(peer(0), given_up=(0,))  # only to write its stacks
    assert woken.is_reporter and woken.replaces_rank_0
    failed = seen(peer(0, state="failed", ended=1))
    assert not failed.is_reporter and not failed.replaces_rank_0
    # after rank 0 died and rank 2 failed: whether the lowest survivor or one that failed without a message was first
    died = peer(0, ended=2)
    told, silent = (peer(2, state="failed", ended=1, has_reported=each) for each in (True, False))
    assert not seen(died, told).is_reporter and not seen(died, told).replaces_rank_0
    assert seen(died, silent).is_reporter and seen(died, silent).replaces_rank_0
    third = beat(rank=3, phase="save", num_phases=1)
    assert not seen(died, silent, own=third).is_reporter and seen(died, own=third).is_reporter


def test_of_several_ends_the_one_with_words_is_told_first():
    died = peer(2, ended=1)
    assert "rank 2 (pid" in str(seen(died).cause()) and seen(died).cause(after_seconds=2) is None
    assert seen(died, given_up=(2,)).cause() is None  # its end is the watchdog's own doing
    first = seen(died, peer(3, state="failed", reason="rank 3: no rows", exit_code=3, ended=1)).cause()
    assert (str(first), first.exit_code) == ("rank 3: no rows", 3)


def test_a_build_takes_as_long_as_it_takes_while_hearts_beat():
    """Without processes: on a busy machine a heart is late for longer than a test can wait."""
    build, step = (beat(phase=phase, idle_seconds=1000) for phase in ("build", "step"))  # nothing has moved here
    beats, late = peer(2, age=30, idle_seconds=1000), peer(2, age=61, idle_seconds=1000)  # nor there
    assert not seen(beats, own=build).hangs
    assert seen(beats, own=step).hangs
    assert (
        seen(peer(2, phase="save", num_phases=1)).describe_hang("")
        == "all 2 ranks that can be seen are in phase save of step 3"
    )
    assert seen(late, own=build).hangs and not seen(late, own=build, looked=1000).hangs
    assert not replace(seen(late, own=step), limit=0).hangs


def test_nobody_is_accused_when_the_storage_does_not_answer():
    assert [frozen.beat.rank for frozen in seen(peer(0, age=1000)).frozen] == [0]
    silent = seen(peer(0, age=1000), looked=1000)
    assert silent.frozen == [] and silent.describe_hang("/runs/a").endswith("the storage of /runs/a does not answer")


def test_whoever_gave_a_rank_up_says_why(tmp_path):
    """Its end makes launchers and collectives speak, which know less."""
    watch = HangWatchdog(tmp_path, 60, lambda _: None)
    start = time.monotonic()
    watch.wait_if_ending()
    assert time.monotonic() - start < 1
    watch.given_up = {2}
    waiting = threading.Thread(target=watch.wait_if_ending, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    watch.given_up = set()
    waiting.join(5)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("news", "found"),
    [
        ({"rank": 2, "state": "failed", "has_reported": True}, (False, True)),
        ({"rank": 0, "pid": 0}, (True, False)),  # dead
        ({"rank": 2}, (False, False)),
    ],
)
def test_a_rank_waits_for_a_report_or_for_its_turn(news, found, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(watchdog, "REPORT_SECONDS", 30 if any(found) else 1)
    with HangWatchdog(tmp_path, 0, lambda _: None) as watch:
        watch.phase("step", 12)
        write_beat(watch.heartbeats.folder, beat(rank=0))  # lives
        pid = news.get("pid", os.getpid()) or ended_process()
        threading.Timer(0.3, write_beat, [watch.heartbeats.folder, replace(beat(), **news | {"pid": pid})]).start()
        began = time.monotonic()
        assert watch.wait_for_report() == found
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("state", ["finished", "running"])
def test_the_last_word_is_read_before_a_death_is_told(state, tmp_path):
    errors = []
    other, now = beat(pid=ended_process()), time.monotonic()
    with HangWatchdog(tmp_path, 0, errors.append, interval=0.05) as watch:
        write_beat(watch.heartbeats.folder, replace(other, state=state))
        watch.heartbeats.peers[1] = Peer(other, now, ended=now - 10)
        time.sleep(0.5)
    assert [type(error) for error in errors] == ([] if state == "finished" else [PeerError])
