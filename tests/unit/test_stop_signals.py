"""Requests to stop: in the loop they wait for its end of step, elsewhere and the second time they end at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from surrounded import END, ROOT, START, ranks, status, wait_until

from samecurve.run import signals
from samecurve.run.signals import StopRequest

LOOP = """
meet(watch)
with watch.deferred():
    watch.phase("step", 4)
    run.append_metrics({"step": 3})
    ready()
    while not watch.requested:
        time.sleep(0.02)
    raise Preempted(f"saved after {watch.requested}")
"""
# the main thread does not come back from a step
STUCK = """
meet(watch)
with watch.deferred():
    watch.phase("step", 4)
    ready()
    wait()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("words", "is_launcher"),
    [(["/srv/deepspeed/bin/bash", "/srv/python/run.sh"], False), (["/usr/bin/python3", "/venv/bin/deepspeed"], True)],
)
def test_a_folder_with_a_launchers_name_is_none(words, is_launcher, monkeypatch):
    init = SimpleNamespace(pid=1, name=lambda: words[0], cmdline=lambda: words)
    monkeypatch.setattr(signals.psutil, "Process", lambda _: SimpleNamespace(parent=lambda: init))
    assert signals._above("deepspeed") == ((os.getppid(), 1) if is_launcher else (os.getppid(),))
    monkeypatch.setattr(signals.psutil, "Process", lambda _: init)
    assert signals._adopted() is not is_launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_in_the_loop_a_signal_is_a_request(number, tmp_path):
    with ranks(tmp_path / "run", LOOP) as [rank]:
        rank.wait_until("ready")
        rank.process.send_signal(number)
        assert rank.ends() == 75
    name = signal.Signals(number).name
    assert status(rank.folder) == {"state": "preempted", "reason": f"saved after {name}", "step": 3, "exit_code": 75}
    assert rank.said.splitlines() == [
        "ready",
        f"{name}: the run saves and stops after this step or the next; a second signal ends it at once",
        "",
        f"preempted (exit code 75): saved after {name}",
    ]


def test_a_second_signal_ends_at_once_but_not_the_launchers_repetition(tmp_path):
    with ranks(tmp_path / "run", STUCK) as [rank]:
        rank.wait_until("ready")
        rank.process.send_signal(signal.SIGINT)
        rank.wait_until("second signal")
        rank.process.send_signal(signal.SIGTERM)  # as deepspeed's launcher does
        with pytest.raises(subprocess.TimeoutExpired):
            rank.ends(signals.REPEATED_SECONDS + 0.3)
        rank.process.send_signal(signal.SIGINT)
        assert rank.ends(5) == 130
    reason = "ended by SIGINT in phase step of step 4"
    assert status(rank.folder) == {"state": "failed", "reason": reason, "step": 0, "exit_code": 130}
    assert "Traceback" not in rank.said and f"{reason} (exit code 130)" in rank.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_outside_of_the_loop_the_first_signal_ends(number, tmp_path):
    with ranks(tmp_path / "run", "ready()\nwait()\ntime.sleep(60)") as [rank]:
        rank.wait_until("ready")
        rank.process.send_signal(number)
        assert rank.ends(5) == 128 + number
    reason = f"ended by {signal.Signals(number).name} in phase start"
    assert status(rank.folder) == {"state": "failed", "reason": reason, "step": 0, "exit_code": 128 + number}


def test_a_signal_in_the_export_ends_with_a_request_that_came_too_late(tmp_path):
    """The loop was through when it was asked; the run goes on to the export, and there the next signal ends it."""
    body = LOOP.replace('raise Preempted(f"saved after {watch.requested}")', "time.sleep(1.1)")
    with ranks(tmp_path / "run", body + "watch.phase('export')\nprint('exporting', flush=True)\nwait()") as [rank]:
        rank.wait_until("ready")
        rank.process.send_signal(signal.SIGTERM)
        rank.wait_until("exporting")
        rank.process.send_signal(signal.SIGTERM)
        assert rank.ends(5) == 143
    assert status(rank.folder)["reason"] == "ended by SIGTERM in phase export"


LAUNCHER = """
import subprocess, sys
process = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
print(process.pid, flush=True)
process.wait()
"""


@pytest.mark.parametrize(
    ("launcher", "body", "state", "code", "reason"),
    [
        ("torchrun", LOOP, "preempted", 75, "saved after the launcher ended"),
        ("torchrun", "ready()\nwait()\ntime.sleep(60)", "failed", 143, "the launcher ended in phase start"),
        ("python", "ready()\ntime.sleep(2.5)", "done", 0, ""),
    ],
    ids=["loop", "start", "plain"],
)
def test_a_launcher_that_is_killed(launcher, body, state, code, reason, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    text = START + "def body(run, watch):\n" + "".join(f"    {line}\n" for line in body.strip().splitlines()) + END
    env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER, text, str(run), launcher, "0"]
    with open(log, "w") as stream, subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=stream) as parent:
        wait_until(lambda: "ready" in log.read_text())
        parent.kill()
        parent.wait()
        wait_until(lambda: status(run)["state"] != "running")
    found = status(run)
    assert (found["state"], found["exit_code"], found["reason"]) == (state, code, reason)


def test_a_launcher_that_is_gone_before_the_process_can_look(tmp_path):
    """Killed while its ranks are still being started: seen in one of 200 random kills, whose ranks stayed."""
    run = tmp_path / "run"
    text = START + "def body(run, watch):\n    wait()\n    time.sleep(60)\n" + END
    env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", text, str(run), "torchrun", "0"]
    with subprocess.Popen(["sh", "-c", '(sleep 0.5; exec "$@") & exit', "sh", *command], env=env) as parent:
        parent.wait()
        wait_until(lambda: (run / "status.json").exists() and status(run)["state"] != "running")
    assert (status(run)["exit_code"], status(run)["reason"]) == (143, "the launcher ended in phase start")


def test_what_the_parent_ignores_stays_ignored(tmp_path):
    """nohup ignores SIGHUP, a script's background job SIGINT."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest(lambda *_: None, lambda _: None, lambda: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_all_is_as_before_afterwards():
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    with StopRequest(lambda *_: None, lambda _: None, lambda: None):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    wait_until(lambda: "stop" not in [thread.name for thread in threading.enumerate()])


def test_a_signal_to_a_forked_child_is_its_own():
    """A data loader ends its workers with SIGTERM; they share this process's channel."""
    ended = []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # a handler that another test left would run in the child
    with StopRequest(lambda *what: ended.append(what), lambda _: None, lambda: None):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(tell, b"x")  # what runs at a fork is behind it
                time.sleep(20)
            finally:
                os._exit(0)  # and never go on with the tests
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.2)
    assert ended == []


def test_only_the_first_rank_tells_of_the_request(tmp_path):
    with ranks(tmp_path / "run", LOOP, LOOP) as (first, second):
        for rank in (first, second):
            rank.wait_until("ready")
        second.process.send_signal(signal.SIGTERM)
        first.process.send_signal(signal.SIGTERM)
        assert (first.ends(), second.ends()) == (75, 75)
    assert "second signal" in first.said and "preempted" in first.said
    assert second.said == "ready\n"
    assert json.loads((first.folder / "heartbeats" / "rank_00001.json").read_text())["state"] == "finished"
